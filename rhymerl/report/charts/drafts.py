"""Charts of drafts: speed-up, acceptance, and sources of tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rhymerl.report.answers import ratios
from rhymerl.report.base import Curve, Run
from rhymerl.report.charts.base import Chart, line_charts, of_run, run_colour, series_of

_SOURCES = {
    "own": "own text",
    "sibling": "siblings",
    "history": "history",
    "run_ahead": "run-ahead",
    "other": "other prompts",
}
_GAINS = {
    "rollout/spec_accept_length": (
        "Acceptance length",
        "Tokens that a request got in a forward pass; 1 without drafts.",
        "tokens",
    ),
    "rollout/speedup": (
        "Speed-up by drafts",
        "The time that the same answers would have taken without drafts, over the time they took; below 1 drafts cost time.",
        "times as fast",
    ),
}
_NUM_DEPTHS = 8
_NUM_PERIODS = 4


def draft_charts(runs: Sequence[Run]) -> list[Chart]:
    """Return the charts of this section; nothing of runs without drafts."""
    drafted = [run for run in runs if run.has("rollout/spec_accept_rate")]
    if not drafted:
        return []
    return [
        *line_charts(runs, _GAINS, reference=1, from_zero=False),
        _acceptance_by_epoch(runs),
        *(_acceptance_by_position(run, runs) for run in drafted),
        *(_origins(run, runs) for run in drafted),
    ]


def _acceptance_by_epoch(runs: Sequence[Run]) -> Chart:
    series = []
    for index, run in enumerate(runs):
        if run.answers is None or not run.answers.drafted.any():
            continue
        found = ratios(run.answers.epoch, run.answers.accepted, run.answers.drafted)
        series.append(series_of(run.name, found, run_colour(index), "bars"))
    return Chart(
        id="acceptance-epoch",
        title="Acceptance by epoch",
        caption="Drafted tokens that were right, as a share of those that were verified, in each pass over the prompts.",
        x_title="epoch",
        y_title="share of drafted tokens",
        series=series,
    )


def _acceptance_by_position(run: Run, runs: Sequence[Run]) -> Chart:
    """Return a line a quarter of the run: means over its steps with drafts that went so deep."""
    names = [f"spec/accept_rate_pos_{depth}" for depth in range(1, _NUM_DEPTHS + 1)]
    curves = [run.curves[name] for name in names] if all(name in run.curves for name in names) else []
    steps = sorted({step for curve in curves for step in curve})
    periods = [part for part in np.array_split(np.array(steps), min(_NUM_PERIODS, len(steps) or 1)) if len(part)]
    series = []
    for number, period in enumerate(periods):
        first, last = int(period[0]), int(period[-1])
        means = {depth: _mean_between(curve, first, last) for depth, curve in enumerate(curves, start=1)}
        known = {depth: mean for depth, mean in means.items() if mean is not None}
        if known:
            series.append(series_of(f"steps {first} to {last}", known, f"period-{number}"))
    return Chart(
        id=f"acceptance-position-{runs.index(run)}",
        title=of_run("Acceptance by position", run, runs),
        caption="Of drafts that went so deep, the share that was right so far down: mean over steps that had such drafts.",
        x_title="position in the draft",
        y_title="share of drafts",
        series=series,
    )


def _mean_between(curve: Curve, first: int, last: int) -> float | None:
    """Return the mean over these steps but those without any draft as deep, which log 0."""
    found = [value for step, value in curve.items() if first <= step <= last and value]
    return sum(found) / len(found) if found else None


def _origins(run: Run, runs: Sequence[Run]) -> Chart:
    """Return the share of each step's tokens that were drafted, by source."""
    answers = run.answers
    share = ratios(answers.step, answers.accepted, answers.tokens) if answers is not None else {}
    series = []
    for name, words in _SOURCES.items() if share else ():
        metric = f"spec/accepted_{name}_frac"
        if run.has(metric):
            whole = {step: value * share[step] for step, value in run.curves[metric].items() if step in share}
            series.append(series_of(words, whole, f"source-{name}", "area"))
    return Chart(
        id=f"origins-{runs.index(run)}",
        title=of_run("Tokens from drafts, by source", run, runs),
        caption="Share of all response tokens that were accepted from a draft; the policy sampled the others without one.",
        x_title=run.step_name,
        y_title="share of tokens",
        series=series,
    )
