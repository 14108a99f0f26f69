"""The answers of a group that the history keeps, chosen by their rewards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from rhymerl.history.records import Answer
from rhymerl.types import Prompt, Sample

if TYPE_CHECKING:
    from rhymerl.types import FloatArray


_ROUNDING = 1e-9  # of a weighted sum of rewards


def are_alike(rewards: Sequence[float]) -> bool:
    """Return whether the answers of a group are equally good, up to rounding."""
    return max(rewards) - min(rewards) <= _ROUNDING


def group_advantages(rewards: Sequence[float]) -> FloatArray:
    """Return how much better than its group each answer was, [G], in standard deviations; all 0 where all are alike.

    This is the history's own measure, whatever the algorithm's is: it only tilts which earlier answer a draft follows.
    """
    values = np.asarray(rewards, np.float64)
    return np.zeros(len(values)) if are_alike(rewards) else (values - values.mean()) / values.std()


def answers_of(samples: Sequence[Sample], epoch: int) -> Iterator[tuple[Prompt, list[Answer]]]:
    """Yield the scored answers of a step by prompt, in the order in which prompts first occur; a repeated prompt is one."""
    groups: dict[str, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.prompt.key, []).append(sample)
    for group in groups.values():
        advantages = group_advantages([sample.reward for sample in group]).tolist()
        yield (
            group[0].prompt,
            [_answer(sample, number, advantages[number], epoch) for number, sample in enumerate(group)],
        )


def _answer(sample: Sample, number: int, advantage: float, epoch: int) -> Answer:
    completion = sample.completion
    versions = completion.output.policy_versions
    return Answer(
        token_ids=completion.token_ids,
        reward=sample.reward,
        advantage=advantage,
        finish_reason="stop" if completion.finish_reason == "stop" else "length",
        policy_version=int(versions[-1]) if len(versions) else 0,
        epoch=epoch,
        sample=number,
    )
