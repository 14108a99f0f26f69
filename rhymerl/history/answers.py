"""The answers of a group that the history keeps, chosen by their rewards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import isnan

import numpy as np

from rhymerl.history.records import Answer
from rhymerl.types import FloatArray, Prompt, Sample

_ROUNDING = 1e-9  # of a weighted sum of rewards


def are_alike(rewards: Sequence[float]) -> bool:
    """Return whether a group's rewards are equal, up to rounding; answers without a reward (NaN) do not count."""
    known = [reward for reward in rewards if not isnan(reward)]
    return not known or max(known) - min(known) <= _ROUNDING


def group_advantages(rewards: Sequence[float]) -> FloatArray:
    """Return each answer's advantage over its group, [G], in standard deviations.

    It is 0 if all are alike, and without a reward. This is the history's own measure, whatever the algorithm's is: it
    only tilts which earlier answer a draft follows.
    """
    if are_alike(rewards):
        return np.zeros(len(rewards))
    values = np.asarray(rewards, np.float64)
    is_known = ~np.isnan(values)
    known = values[is_known]
    return np.where(is_known, (values - known.mean()) / known.std(), 0.0)


def answers_of(samples: Sequence[Sample], epoch: int) -> Iterator[tuple[Prompt, list[Answer]]]:
    """Yield a step's scored answers by prompt, in order of first occurrence; a repeated prompt is one."""
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
        reward=sample.reward if sample.has_reward else 0.0,
        advantage=advantage,
        finish_reason="stop" if completion.finish_reason == "stop" else "length",
        policy_version=int(versions[-1]) if len(versions) else 0,
        epoch=epoch,
        sample=number,
    )
