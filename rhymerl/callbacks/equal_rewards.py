"""Rewards that teach nothing, because they do not tell the answers apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rhymerl.types import Sample

Advantages = Callable[[Sequence[int]], Sequence[float | None]]


def equal_rewards(samples: Sequence[Sample], *, frac_zero_std: float, advantages: Advantages) -> str | None:
    """Return how the answers of a step are rewarded alike, so that nothing can be learned from them; None where something can.

    `frac_zero_std` is the step's metric; `advantages` are asked, by index of a sample, only where it is 1.
    """
    if frac_zero_std < 1:
        return None
    rewards = {sample.reward for sample in samples}
    if len(rewards) == 1:
        return f"all {len(samples):,} answers have the same reward ({rewards.pop():g})"
    if any(advantages(range(len(samples)))):
        return None  # the baseline is not the group's
    return "all answers to each prompt have the same reward"
