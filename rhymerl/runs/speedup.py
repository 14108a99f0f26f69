"""What drafts were worth in a run: the speed-up of its rollouts, with an interval."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import exp, hypot, log, sqrt
from typing import Any

import numpy as np

_LEAST = 3  # reports whose error is known, for an interval
_FEW = 8  # of these, the median deviation is no measure of how far they are apart
_EFFICIENCY = 0.37
_TOO_WIDE = 1.25  # its upper end over its lower
_NORMAL = 1.960  # standard deviations to each side have 95 % of a normal distribution
# Standard deviation of the figure from what pairs of whole runs had, without the noise of these
# (benchmarks/drafting/paired_runs.py).
_OF_THE_CURVE = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Speedup:
    """The time of the run's rollouts without drafts over their time with drafts, and a 95 % interval if known."""

    ratio: float
    low: float | None = None
    high: float | None = None

    @property
    def is_known(self) -> bool:
        """Return whether the run was long enough to tell."""
        if self.low is None or self.high is None:
            return False
        return not self.low <= 1 <= self.high or self.high <= _TOO_WIDE * self.low

    def __str__(self) -> str:
        """Return a line that claims nothing that the run does not show."""
        interval = f"95 % interval {self.low:.2f} to {self.high:.2f}" if self.low is not None else ""
        if not self.is_known:
            return ": ".join(filter(None, ["Too short a run to tell what drafts were worth", interval]))
        return f"Drafts made rollouts {self.ratio:.2f} times as fast ({interval})"


@dataclass(slots=True)
class SpeedupTotals:
    """Sums up a run's `rollout/speedup`, and how far passes were from its cost curve (docs/operations.md).

    The report of a step covers all rollouts since the last one.
    """

    rollout_s: float = 0.0
    plain_s: float = 0.0  # what these rollouts would have taken
    drafted_s: float = 0.0  # in which there were drafts
    unreported_s: float = 0.0
    errors: list[float] = field(default_factory=list)  # of the figure of each report with drafts; logarithms
    num_plain: int = 0  # reports without drafts, of which it is certain

    def count(self, metrics: Mapping[str, Any], *, rollout_s: float) -> None:
        """Add a step, whose own metrics these are."""
        self.unreported_s += rollout_s
        if "rollout/speedup" not in metrics:
            return
        self.rollout_s += self.unreported_s
        self.plain_s += self.unreported_s * float(metrics["rollout/speedup"])
        share = float(metrics["rollout/drafted_pass_frac"])
        self.drafted_s += share * self.unreported_s
        self.unreported_s = 0.0
        plain, drafted = (float(metrics[f"rollout/{name}_pass_error"]) for name in ("plain", "drafted"))
        if plain > 0 and drafted > 0:  # there were passes of both kinds
            self.errors.append(share * log(plain / drafted))
        elif plain > 0:
            self.num_plain += 1

    @property
    def speedup(self) -> Speedup | None:
        """Return what drafts were worth; None where no step said anything.

        Passes with drafts are compared with what passes without them would have taken. A machine that is slower for a
        while is so for both, so the figure is as uncertain as the mean difference of their errors, in so far as there
        were drafts. A curve that is wrong in each report alike does not show in that difference, so what it usually
        comes to is added.
        """
        if not self.rollout_s:
            return None
        ratio = self.plain_s / self.rollout_s
        known = len(self.errors)
        if known + self.num_plain < _LEAST or 0 < known < _LEAST:
            return Speedup(ratio=ratio)
        seen = _half_interval(self.errors) * known / (known + self.num_plain) if known else 0.0
        half = hypot(seen, _NORMAL * _OF_THE_CURVE * self.drafted_s / self.rollout_s)
        return Speedup(ratio=ratio, low=ratio * exp(-half), high=ratio * exp(half))

    def state_dict(self) -> dict[str, Any]:
        """Return the sums in plain containers."""
        return asdict(self)


def _half_interval(values: Sequence[float]) -> float:
    """Return half of the 95 % interval of the mean.

    For many values it uses the median deviation: a machine that was busy for a while is no error. That deviation is as
    uncertain as a standard deviation of `_EFFICIENCY` times as many values (Rousseeuw and Croux 1993).
    """
    count, degrees = len(values), len(values) - 1.0
    if count < _FEW:
        deviation = float(np.std(values, ddof=1))
    else:
        deviation = 1.4826 * count / (count - 0.8) * float(np.median(np.abs(np.array(values) - np.median(values))))
        degrees *= _EFFICIENCY
    return _student_t(degrees) * deviation / sqrt(count)


def _student_t(degrees: float) -> float:
    """Return Student's t at 97.5 % (Abramowitz and Stegun, 26.7.5), to 3 % for 2 degrees and better for more."""
    return _NORMAL + 2.372 / degrees + 2.823 / degrees**2 + 2.556 / degrees**3
