"""A training step of rhymerl and of TRL's GRPOTrainer with SmolLM2-135M-Instruct, and what each learns from it.

6 prompts x 6 answers in float32, one optimizer step a rollout; otherwise as in `trl_echo.py`. With --task addition, the model that
`make pretrained` fetches learns to add in its chat template, with answers of at most 32 tokens; with --task sums, the model that
`rhymerl warmstart --config warmstart_smollm2_sums` has made adds some 11 numbers step by step. With --train-size, both have so many prompts,
and go through them again and again. `ms_per_token` is the step over all generated tokens.

    make pretrained  # once: it fetches the model
    python benchmarks/trl_pretrained.py --trl-python PYTHON_WITH_TRL [--steps 20] [--seeds 3]
    python benchmarks/trl_pretrained.py --task sums --model out/warmstart_smollm2_sums --max-tokens 256 --rows-per-backward 6 ...
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import against_trl

from rhymerl.config import compose, instantiate
from rhymerl.models.policy import PolicySource

# The config whose task it is, and what rewards it.
TASKS = {
    "addition": ("smollm2", "sum_rewards.last_number"),
    "sums": ("smollm2_sums", "sum_rewards.total"),
}


def main(words: Sequence[str] | None = None) -> dict[str, Any]:
    sizes = {"prompts": 6, "group_size": 6, "max_tokens": 32, "learning_rate": 3e-5}
    parser = against_trl.options(__doc__, steps=20, warm_up=2, **sizes)
    parser.add_argument("--task", choices=list(TASKS), default="addition")
    parser.add_argument("--model", help="GGUF file or directory; the one that `make pretrained` fetches by default")
    parser.add_argument("--train-size", type=int, help="prompts (default: those of the task's config)")

    def save(arguments: Any) -> against_trl.Save:
        model = PolicySource(arguments.model or compose("smollm2").model.path)
        return lambda policy, seed: model.load().save(policy)

    return against_trl.compare(
        "trl_pretrained",
        __doc__,
        parser,
        words,
        save=save,
        rows=lambda arguments: list(instantiate(compose(TASKS[arguments.task][0]).task).rows("train"))[
            : arguments.train_size
        ],
        reward=lambda arguments: TASKS[arguments.task][1],
    )


if __name__ == "__main__":
    main()
