"""The summary at the end of a run; its state travels in the checkpoint, so a resumed run sums up the whole of it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import exp, hypot, log, sqrt
from typing import Any

import lightning as L
import numpy as np
from rich.table import Table

from rhymerl.callbacks.early_warnings import all_left_out, equal_rewards
from rhymerl.report.printing import readable
from rhymerl.rewards.failures import Failures
from rhymerl.rollout import Rollout
from rhymerl.rollout.metrics import AcceptanceTotals

_WINDOW = 5  # steps at most that make `reward_first` and `reward_last`, which share none
_LEAST = 3  # reports whose error is known, for an interval
_FEW = 8  # of these, the median deviation is no measure of how far they are apart
_EFFICIENCY = 0.37
_TOO_WIDE = 1.25  # its upper end over its lower
_NORMAL = 1.960  # standard deviations to each side have 95 % of a normal distribution
# Standard deviation of the figure from what pairs of whole runs had, without the noise of these
# (benchmarks/drafting/paired_runs.py).
_OF_THE_CURVE = 0.05


@dataclass(eq=False)
class Summary(L.Callback):
    """Collects a run's figures. `result()` gives them by the names of summary.json."""

    eval_before: float | None = None
    eval_after: float | None = None
    first_rewards: list[float] = field(default_factory=list)
    last_rewards: list[float] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=lambda: {"wall": 0.0, "rollout": 0.0, "update": 0.0})
    num_steps: int = 0
    num_tokens: int = 0
    num_calls: int = 0  # of rewards
    num_failed_calls: int = 0
    num_bad_drafts: int = 0
    num_idle_steps: int = 0  # from which nothing could be learned
    num_left_out_steps: int = 0  # of these: all answers were cut off and left out of the loss
    failures: Failures = field(default_factory=Failures)  # of the rewards
    acceptance: AcceptanceTotals = field(default_factory=AcceptanceTotals)
    speedup: SpeedupTotals = field(default_factory=lambda: SpeedupTotals())

    def __post_init__(self) -> None:
        self._since: float | None = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._since = time.perf_counter()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        metrics = trainer.callback_metrics
        self.seconds["rollout"] += float(metrics["timing_s/rollout"])
        self.seconds["update"] += float(metrics["timing_s/update"])
        self.num_steps += 1
        self.num_tokens = int(metrics["num_tokens"])
        self.num_bad_drafts += int(metrics.get("spec/bad_drafts", 0))
        rollout: Any = getattr(pl_module, "last_rollout", None)
        if rollout is not None:
            self.speedup.count(rollout.metrics, rollout_s=float(metrics["timing_s/rollout"]))
            self.acceptance.count(sample.completion for sample in rollout.samples)
            self._count_rewards(rollout, pl_module)
        self._lap()

    def _count_rewards(self, rollout: Rollout, pl_module: Any) -> None:
        if (reward := rollout.metrics.get("reward")) is not None:
            self.first_rewards = [*self.first_rewards, reward][:_WINDOW]
            self.last_rewards = [*self.last_rewards, reward][-_WINDOW:]
        self.num_calls += sum(len(sample.rewards) for sample in rollout.samples)
        self.num_failed_calls += sum(rollout.failures.num_failed.values())
        self.failures += rollout.failures
        share, asked = rollout.metrics["frac_reward_zero_std"], pl_module.advantages
        is_left_out = all_left_out(rollout.samples, asked)
        is_equal = equal_rewards(rollout.samples, frac_zero_std=share, advantages=asked) is not None
        self.num_left_out_steps += is_left_out
        self.num_idle_steps += is_left_out or is_equal

    @property
    def nothing_learned(self) -> str | None:
        """Return why nothing was learned in any step; None where something was."""
        if not self.num_steps or self.num_idle_steps < self.num_steps:
            return None
        if self.num_left_out_steps == self.num_steps:
            return "all answers were cut off at rollout.max_tokens and left out of the loss"
        return "the rewards did not tell the answers to a prompt apart in any step"

    def _lap(self) -> None:
        now = time.perf_counter()
        self.seconds["wall"] += now - (self._since if self._since is not None else now)
        self._since = now

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        kinds = {"failures": Failures, "acceptance": AcceptanceTotals, "speedup": SpeedupTotals}
        for name, value in state_dict.items():
            setattr(self, name, kinds[name](**value) if name in kinds else value)

    def result(self) -> dict[str, Any]:
        """Return the figures: `wall_s` is training alone (rollouts, updates, between), rewards average <= 5 steps."""
        rollout_s = self.seconds["rollout"]
        window = max(1, min(_WINDOW, self.num_steps // 2))
        speedup = self.speedup.speedup
        return {
            "eval_reward_before": self.eval_before,
            "eval_reward_after": self.eval_after,
            "reward_first": _mean(self.first_rewards[:window]),
            "reward_last": _mean(self.last_rewards[-window:]),
            "reward_failure_rate": self.num_failed_calls / max(self.num_calls, 1),
            "steps": self.num_steps,
            "wall_s": round(self.seconds["wall"], 3),
            "rollout_s": round(rollout_s, 3),
            "update_s": round(self.seconds["update"], 3),
            "rollout_tokens_per_s": round(self.num_tokens / rollout_s, 1) if rollout_s else None,
            "num_tokens": self.num_tokens,
            "spec_accept_rate": round(self.acceptance.accept_rate, 4),
            "spec_accept_length": round(self.acceptance.accept_length, 4),
            **({"spec_bad_drafts": self.num_bad_drafts} if self.num_bad_drafts else {}),
            **({"problems": problems} if (problems := self.failures.sentences()) else {}),
            "rollout_speedup": _rounded(speedup.ratio) if speedup and speedup.is_known else None,
            "rollout_speedup_low": _rounded(speedup.low) if speedup else None,
            "rollout_speedup_high": _rounded(speedup.high) if speedup else None,
        }


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _rounded(value: float | None) -> float | None:
    return round(value, 3) if value is not None else None


def summary_table(result: Mapping[str, Any]) -> Table:
    """Return the closing table, of numbers alone."""
    table = Table(title="Summary", title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    for name, value in result.items():
        if isinstance(value, int | float):
            is_bad = name in ("reward_failure_rate", "spec_bad_drafts") and value > 0
            table.add_row(name, readable(value), style="bold red" if is_bad else None)
    return table


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
