"""Rewards that teach nothing, because they do not tell the answers apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rhymerl.types import Sample

Advantages = Callable[[Sequence[int]], Sequence[float | None]]


def all_left_out(samples: Sequence[Sample], advantages: Advantages) -> bool:
    """Return whether all answers of a step were cut off at their limit, and are left out of the loss for it."""
    are_cut = all(sample.completion.output.is_cut for sample in samples)
    return are_cut and all(each is None for each in advantages(range(len(samples))))


def equal_rewards(samples: Sequence[Sample], *, frac_zero_std: float, advantages: Advantages) -> str | None:
    """Return how a step's answers are rewarded alike, so that they teach nothing; None where some differ.

    `frac_zero_std` is the step's metric; `advantages` are asked, by index of a sample, only where it is 1.
    """
    if frac_zero_std < 1:
        return None
    turns = [turn for sample in samples for turn in sample.completion.output.turns]
    if samples[0].turn_weight and all(turn.reward is None for turn in turns):
        return f"the environment gave no reward in any of the {len(samples):,} episodes"
    rewards = {sample.reward for sample in samples if sample.has_reward}
    if not rewards:
        return f"no reward applies to any of the {len(samples):,} answers"
    if len(rewards) == 1:
        return f"all {sum(sample.has_reward for sample in samples):,} answers have the same reward ({rewards.pop():g})"
    if any(advantages(range(len(samples)))):
        return None  # the baseline is not the group's
    return "all answers to each prompt have the same reward"
