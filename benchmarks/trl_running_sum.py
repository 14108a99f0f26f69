"""A training step of rhymerl and of TRL's GRPOTrainer on the quickstart's running sums, and what each learns from it.

Both begin with the quickstart's policy, which has imitated sloppy demonstrations, and train on its problems: a step is a quarter of an epoch, of
`--prompts` prompts x 8 answers x at most 128 tokens, with one optimizer step and a backward of `--rows-per-backward` answers on TRL's side; otherwise as in
`trl_echo.py`. From the second epoch on our side drafts from the answers before. `ms_per_token` is the step over all generated tokens.

    python benchmarks/trl_running_sum.py --trl-python PYTHON_WITH_TRL [--steps 32] [--seeds 3]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import against_trl

from rhymerl.config import compose
from rhymerl.models.policy import PolicySource
from rhymerl.tasks.running_sum import RunningSum


def main(words: Sequence[str] | None = None) -> dict[str, Any]:
    sizes = {"prompts": 16, "group_size": 8, "max_tokens": 128, "learning_rate": 3e-4, "rows_per_backward": 64}
    parser = against_trl.options(__doc__, steps=32, warm_up=4, **sizes)
    model = PolicySource(compose("quickstart").model.path)
    return against_trl.compare(
        "trl_running_sum",
        __doc__,
        parser,
        words,
        save=lambda arguments: lambda policy, seed: model.load().save(policy),
        rows=lambda arguments: list(RunningSum(train_size=4 * arguments.prompts).rows("train")),
        reward=lambda arguments: "sum_rewards.total",
    )


if __name__ == "__main__":
    main()
