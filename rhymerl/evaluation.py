"""Evaluation: how validation prompts are answered, and what is said of the answers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rhymerl.errors import require_at_least
from rhymerl.rollout import RolloutSettings
from rhymerl.types import Sample


class EvaluationSettings:
    """`samples` answers a validation prompt at `temperature`; all else is the training rollout's.

    A run is evaluated before and after training, and every `every_n_steps` rollout steps in between if that is not 0.
    """

    def __init__(
        self, *, samples: int = 1, temperature: float = 1.0, max_tokens: int | None = None, every_n_steps: int = 0
    ) -> None:
        at_least = {
            "samples": (samples, 1),
            "temperature": (temperature, 0),
            "max_tokens": (1 if max_tokens is None else max_tokens, 1),
            "every_n_steps": (every_n_steps, 0),
        }
        require_at_least("evaluation", at_least)
        self.every_n_steps = every_n_steps
        self.samples = samples
        self.temperature = temperature
        self.max_tokens = max_tokens

    def rollout(self, training: RolloutSettings) -> RolloutSettings:
        """The settings of a validation rollout."""
        return RolloutSettings(
            group_size=self.samples,
            max_tokens=self.max_tokens or training.max_tokens,
            temperature=self.temperature,
            top_k=training.top_k,
            top_p=training.top_p,
            min_p=training.min_p,
            stop_token_ids=training.stop_token_ids,
        )


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Unbiased estimate of the chance that one of k answers is right (arXiv 2107.03374, equation 1)."""
    if num_samples - num_correct < k:
        return 1.0
    wrong = np.arange(num_samples - num_correct + 1, num_samples + 1)
    return float(1 - np.prod(1 - k / wrong))


def evaluation_metrics(samples: Sequence[Sample], task: str = "validation") -> dict[str, float]:
    """`eval/reward`, `eval/{task}/mean@k` and `eval/{task}/pass@k` for k = answers a prompt, lengths and truncation.

    An answer counts as right for pass@k when its reward is at least 1.
    """
    groups: dict[str, list[float]] = {}
    for sample in samples:
        groups.setdefault(sample.prompt.id, []).append(sample.reward)
    k = min(map(len, groups.values()))
    mean = float(np.mean([sample.reward for sample in samples]))
    return {
        "eval/reward": mean,
        f"eval/{task}/mean@{k}": mean,
        f"eval/{task}/pass@{k}": float(
            np.mean([pass_at_k(len(g), sum(r >= 1 for r in g), k) for g in groups.values()])
        ),
        "eval/mean_length": float(np.mean([len(sample) for sample in samples])),
        "eval/clipped_ratio": float(np.mean([sample.completion.finish_reason == "length" for sample in samples])),
    }
