"""Paired differences: answers of two runs to the same prompts, with the same noise at the same step."""

from __future__ import annotations

from collections.abc import Sequence
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
    mine, theirs = _by_prompt(first.answers), _by_prompt(second.answers)
    differences: dict[int, list[float]] = {}  # by step: of each prompt's mean
    for step, prompt in sorted(mine.keys() & theirs.keys()):
        here, there = mine[step, prompt], theirs[step, prompt]
        found = [there[sample] - reward for sample, reward in here.items() if sample in there]
        if found:
            differences.setdefault(step, []).append(float(np.mean(found)))
    known = {step: each for step, each in differences.items() if len(each) >= _LEAST_PROMPTS}
    if not known:
        return None
    return PairedDifference(
        steps=list(known),
        mean=np.array([np.mean(each) for each in known.values()]),
        variance=np.array([np.var(each, ddof=1) / len(each) for each in known.values()]),
    )


def _by_prompt(answers: Answers) -> dict[tuple[int, str], dict[int, float]]:
    """Return the rewards by step and prompt, then by sample."""
    found: dict[tuple[int, str], dict[int, float]] = {}
    columns = (answers.step.tolist(), answers.prompt.tolist(), answers.sample.tolist(), answers.reward.tolist())
    for step, prompt, sample, reward in zip(*columns, strict=True):
        if reward == reward:  # those without one are NaN
            found.setdefault((step, answers.prompt_ids[prompt]), {})[sample] = reward
    return found
