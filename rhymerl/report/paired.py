"""Paired differences: answers of two runs to the same prompts, with the same noise at the same step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rhymerl.report.base import Answers, Run
from rhymerl.types import FloatArray

_NORMAL_95 = 1.96
_LEAST_PROMPTS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedDifference:
    """The reward of one run minus another's, by step. S = steps that both have.

    Prompts are the units: the mean over a prompt's answers counts once, and variances are for a mean over prompts.
    """

    steps: Sequence[int]  # [S]
    mean: FloatArray  # [S]
    variance: FloatArray  # [S] of `mean`
    unpaired_variance: FloatArray  # [S] what it would be if the runs had nothing in common

    @property
    def half_width(self) -> FloatArray:
        """Half of the 95 % interval of each step."""
        return _NORMAL_95 * np.sqrt(self.variance)

    @property
    def overall(self) -> tuple[float, float]:
        """Return the mean over all steps, and half of its 95 % interval."""
        return float(self.mean.mean()), float(_NORMAL_95 * np.sqrt(self.variance.sum()) / len(self.steps))


def paired_difference(first: Run, second: Run) -> PairedDifference | None:
    """Return `second` minus `first`; None without answers of equal noise: other seed or prompts, or no record."""
    if first.answers is None or second.answers is None or first.settings.get("seed") != second.settings.get("seed"):
        return None
    mine, theirs = _by_step(first.answers), _by_step(second.answers)
    rows = []
    for step in sorted(mine.keys() & theirs.keys()):
        pairs = _means(mine[step], theirs[step])
        if len(pairs) >= _LEAST_PROMPTS:
            differences = pairs[:, 1] - pairs[:, 0]
            unpaired = pairs.var(axis=0, ddof=1).sum() / len(pairs)
            rows.append((step, differences.mean(), differences.var(ddof=1) / len(pairs), unpaired))
    if not rows:
        return None
    steps, mean, variance, unpaired_variance = zip(*rows, strict=True)
    return PairedDifference(
        steps=steps,
        mean=np.array(mean),
        variance=np.array(variance),
        unpaired_variance=np.array(unpaired_variance),
    )


Rewards = Mapping[str, Mapping[int, float]]  # by prompt and sample


def _by_step(answers: Answers) -> dict[int, dict[str, dict[int, float]]]:
    found: dict[int, dict[str, dict[int, float]]] = {}
    columns = (answers.step.tolist(), answers.prompt.tolist(), answers.sample.tolist(), answers.reward.tolist())
    for step, prompt, sample, reward in zip(*columns, strict=True):
        if reward == reward:  # those without one are NaN
            found.setdefault(step, {}).setdefault(answers.prompt_ids[prompt], {})[sample] = reward
    return found


def _means(mine: Rewards, theirs: Rewards) -> FloatArray:
    """Return the mean rewards [P, 2] of prompts, over the samples that both runs have."""
    rows = []
    for prompt in mine.keys() & theirs.keys():
        samples = mine[prompt].keys() & theirs[prompt].keys()
        if samples:
            rows.append([np.mean([each[prompt][sample] for sample in samples]) for each in (mine, theirs)])
    return np.array(sorted(rows)).reshape(-1, 2)  # sorted: sets have no order
