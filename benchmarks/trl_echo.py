"""A training step of rhymerl and of TRL's GRPOTrainer on the same work, and what each learns from it.

The echo task (echo_task.py) with a Qwen2 of 64 x 2 layers from the same random weights, 8 prompts x 8 answers x at
most 32 tokens (an answer ends early at its end token only), one optimizer step a rollout, the same learning rate,
AdamW and gradient clipping, TensorBoard every step. Each seed is a block of two processes, one a side, in
alternating order. A step is timed from the end of one to the end of the next, so data, reward and logging
are in it; `other_s` is what is neither generation nor update. The first --warm-up steps are not timed.
Spreads are over the seeds; `speedup` is TRL's step time over ours, seed by seed.

    python benchmarks/trl_echo.py --trl-python PYTHON_WITH_TRL [--steps 100] [--seeds 3]

TRL has its own requirements, so give it its own environment (pip install trl datasets tensorboard). Without
--trl-python our side runs alone, and `speedup` is null.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import against_trl
import echo_task

from rhymerl.models.policy import PolicySource


def save(policy: Path, seed: int) -> None:
    PolicySource(init=echo_task.MODEL, characters=echo_task.CHARACTERS, seed=seed).load().save(policy)


def main(words: Sequence[str] | None = None) -> dict[str, Any]:
    sizes = {"prompts": 8, "group_size": 8, "max_tokens": 32, "learning_rate": 1e-3}
    parser = against_trl.options(__doc__, steps=100, warm_up=5, **sizes)
    return against_trl.compare(
        "trl_echo",
        __doc__,
        parser,
        words,
        save=lambda arguments: save,
        rows=lambda arguments: echo_task.rows(),
        reward=lambda arguments: "echo_task.echo",
    )


if __name__ == "__main__":
    main()
