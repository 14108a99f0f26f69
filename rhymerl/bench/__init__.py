"""The benchmarks of `rhymerl bench rollout | drafter | costs`."""
