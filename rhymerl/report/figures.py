"""The key figures of runs, from `summary.json` and their evaluations."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rhymerl.progress import about
from rhymerl.report.base import Curve, Run
from rhymerl.report.printing import readable

_MOST_PROBLEMS, _MOST_CHARACTERS = 20, 1_000
_PARTS = ("algo", "drafter", "budget", "scheduler", "backend")


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A figure by run; `note` explains it."""

    name: str
    values: Sequence[str]
    note: str = ""
    differences: Sequence[str] = ()  # of each run from the first, whose own is empty


def key_figures(runs: Sequence[Run]) -> list[Figure]:
    """Return what a reader wants to know first, as far as any run has it."""
    rows: list[tuple[str, str, str, Callable[[Mapping[str, Any]], str | None]]] = [
        ("eval_reward_after", "Held-out reward", "before and after training", _pair("eval_reward_before", "eval_reward_after")),
        ("reward_last", "Training reward", "first and last steps", _pair("reward_first", "reward_last")),
        ("steps", "Steps", "", _number("steps")),
        ("wall_s", "Training time", "without evaluations", _time),
        ("num_tokens", "Tokens", "of all answers", _number("num_tokens")),
        ("rollout_tokens_per_s", "Rollout speed", "tokens a second", _number("rollout_tokens_per_s")),
        ("spec_accept_length", "Acceptance length", "tokens a pass; 1 without drafts", _number("spec_accept_length")),
        ("rollout_speedup", "Speed-up by drafts", "of rollouts; 1 is as fast as without", _speedup),
        ("reward_failure_rate", "Failed reward calls", "share", _failures),
    ]  # fmt: skip
    found = [
        Figure(
            name=name,
            note=note,
            values=[tell(run.summary) or "" for run in runs],
            differences=[_difference(runs[0].summary.get(key), run.summary.get(key)) for run in runs],
        )
        for key, name, note, tell in rows
    ]
    return [figure for figure in found if any(figure.values)]


def _difference(first: Any, value: Any) -> str:
    """Return how a figure differs from the first run's, in the figure's own unit."""
    if not isinstance(first, int | float) or not isinstance(value, int | float) or first == value:
        return ""
    return f"{'+' if value > first else '-'}{readable(abs(value - first))}"


def header_of(run: Run) -> dict[str, str]:
    """Return what the header says of a run, by name; nothing of a run that recorded nothing."""
    if run.began_at is None:
        return {}
    began = time.strftime("%Y-%m-%d %H:%M", time.localtime(run.began_at))
    took = f"; its last step ended {about(run.steps[-1].ended_at - run.began_at)} later" if run.steps else ""
    return {"began": f"{began}{took}", **{name: words[:_MOST_CHARACTERS] for name, words in run.facts.items()}}


def evaluation_figures(runs: Sequence[Run]) -> dict[str, list[str]]:
    """Return the first and the last value of each metric of evaluations, run by run."""
    names = {name for run in runs for name in run.evaluations}
    return {name: [_first_and_last(run.evaluations.get(name)) for run in runs] for name in sorted(names)}


def parts_of(run: Run) -> list[str]:
    """Return the classes that a run was put together from."""
    targets = (run.settings.get(f"{part}._target_") for part in _PARTS)
    return [target.rpartition(".")[2] for target in targets if target]


def problems_of(run: Run) -> list[str]:
    """Return the sentences of a summary about what went wrong in the run; somebody else's may have anything there."""
    found = run.summary.get("problems")
    return [str(each)[:_MOST_CHARACTERS] for each in found[:_MOST_PROBLEMS]] if isinstance(found, list) else []


def _number(name: str) -> Callable[[Mapping[str, Any]], str | None]:
    return lambda summary: readable(summary[name]) if summary.get(name) is not None else None


def _pair(before: str, after: str) -> Callable[[Mapping[str, Any]], str | None]:
    def tell(summary: Mapping[str, Any]) -> str | None:
        first, last = summary.get(before), summary.get(after)
        known = [value for value in (first, last) if value is not None]
        return " → ".join(f"{value:.3f}" for value in known) or None

    return tell


def _time(summary: Mapping[str, Any]) -> str | None:
    return about(summary["wall_s"]) if summary.get("wall_s") else None


def _speedup(summary: Mapping[str, Any]) -> str | None:
    value, low, high = (summary.get(f"rollout_speedup{end}") for end in ("", "_low", "_high"))
    if low is None or high is None:
        return None
    return f"{'too short to tell' if value is None else f'{value:.2f}'} (95 % interval {low:.2f} to {high:.2f})"


def _failures(summary: Mapping[str, Any]) -> str | None:
    rate = summary.get("reward_failure_rate")
    return f"{rate:.2%}" if rate else None


def _first_and_last(curve: Curve | None) -> str:
    if curve is None:
        return ""
    first, last = (readable(curve[step]) for step in (min(curve), max(curve)))
    return first if len(curve) == 1 else f"{first} → {last}"
