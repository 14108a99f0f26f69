"""What is measured: `rhymerl bench rollout | drafter | costs`."""
