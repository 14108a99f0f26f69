"""The summary at the end of a run; its state travels in the checkpoint, so a resumed run sums up the whole of it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import lightning as L
from rich.table import Table

from rhymerl.callbacks.equal_rewards import all_left_out, equal_rewards
from rhymerl.report.printing import readable
from rhymerl.rewards.failures import Failures
from rhymerl.rollout import Rollout
from rhymerl.rollout.metrics import AcceptanceTotals
from rhymerl.runs.speedup import SpeedupTotals

_STATE = (
    "eval_before",
    "eval_after",
    "first_rewards",
    "last_rewards",
    "seconds",
    "num_steps",
    "num_tokens",
    "num_calls",
    "num_failed_calls",
    "num_bad_drafts",
    "num_idle_steps",
    "num_left_out_steps",
)
_WINDOW = 5  # steps at most that make `reward_first` and `reward_last`, which share none


class Summary(L.Callback):
    """Collects a run's figures. `result()` gives them by the names of summary.json."""

    def __init__(self) -> None:
        self.eval_before: float | None = None
        self.eval_after: float | None = None
        self.first_rewards: list[float] = []
        self.last_rewards: list[float] = []
        self.seconds = {"wall": 0.0, "rollout": 0.0, "update": 0.0}
        self.num_steps = 0
        self.num_tokens = 0
        self.num_calls = 0  # of rewards
        self.num_failed_calls = 0
        self.num_bad_drafts = 0
        self.num_idle_steps = 0  # from which nothing could be learned
        self.num_left_out_steps = 0  # of these: all answers were cut off and left out of the loss
        self.failures = Failures()  # of the rewards
        self.acceptance = AcceptanceTotals()
        self.speedup = SpeedupTotals()
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
        return {
            **{name: getattr(self, name) for name in _STATE},
            "speculation": asdict(self.acceptance),
            "speedup": self.speedup.state_dict(),
            "failures": asdict(self.failures),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        for name in _STATE:
            setattr(self, name, state_dict[name])
        self.acceptance = AcceptanceTotals(**state_dict["speculation"])
        self.speedup = SpeedupTotals(**state_dict["speedup"])
        self.failures = Failures(**state_dict["failures"])

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
