"""Charts of what was learned: rewards, evaluations, lengths, staleness, and what sampling and training differ by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rhymerl.report.base import Run
from rhymerl.report.charts.base import (
    Chart,
    Series,
    area_of,
    line_charts,
    named,
    of_run,
    run_colour,
    series_of,
    step_series,
    thinned,
)
from rhymerl.report.paired import paired_difference

_GAP = "sampling/sampling_logp_difference"
_LINES = {
    "completions/clipped_ratio": (
        "Answers cut off",
        "Share of answers that reached rollout.max_tokens before they ended.",
        "share of answers",
    ),
    "off_policy/staleness/mean": (
        "Staleness",
        "Updates between the policy that sampled a token and the one that it trained, mean over tokens.",
        "updates",
    ),
}
_SOURCES = {"precision": "precision", "age": "age of the weights", "truncation": "truncation, replayed"}


def learning_charts(runs: Sequence[Run]) -> list[Chart]:
    """Return the charts of this section."""
    return [
        reward_chart(runs),
        *_paired(runs),
        _lengths(runs),
        *line_charts(runs, _LINES),
        *(_gap(run, runs) for run in runs if f"{_GAP}/mean" in run.curves),
    ]


def reward_chart(runs: Sequence[Run]) -> Chart:
    """Return the chart of rewards, of training and of evaluations."""
    series: list[Series] = []
    for index, run in enumerate(runs):
        colour = run_colour(index)
        if "reward" in run.curves:
            series += step_series(run, runs, run.curves["reward"], colour)
        if "eval/reward" in run.evaluations:
            series.append(series_of(named(run, "held out", runs), run.evaluations["eval/reward"], colour, "marks"))
    return Chart(
        id="reward",
        title="Reward",
        caption="Dots are steps, the line is the mean of five; diamonds are evaluations on held-out prompts.",
        x_title=runs[0].step_name,
        y_title="mean reward",
        series=series,
    )


def _paired(runs: Sequence[Run]) -> list[Chart]:
    """Yield a chart for each run that can be compared with the first one answer by answer."""
    charts = []
    for run in runs[1:]:
        found = paired_difference(runs[0], run)
        if found is None:
            continue
        colour, number = run_colour(runs.index(run)), runs.index(run)
        low, high = found.mean - found.half_width, found.mean + found.half_width
        band = Series(name="95 %", x=found.steps, y=high.tolist(), low=low.tolist(), colour=colour, kind="band")
        line = Series(name="difference", x=found.steps, y=found.mean.tolist(), colour=colour)
        mean, half = found.overall
        charts.append(
            Chart(
                id=f"paired-{number}",
                title=f"Paired difference: {run.name} - {runs[0].name}",
                caption="Difference of the mean rewards over the same prompts with the same noise, with its 95 % interval over prompts. "
                f"Over all {len(found.steps)} steps {mean:+.4f} ± {half:.4f}.",
                x_title=run.step_name,
                y_title="reward difference",
                series=[band, line],
                reference=0.0,
                from_zero=False,
            )
        )
    return charts


def _gap(run: Run, runs: Sequence[Run]) -> Chart:
    return Chart(
        id=f"gap-{runs.index(run)}",
        title=of_run("Sampling against training", run, runs),
        caption="Absolute difference of the log-probs by where it comes from, mean over tokens: rounding under equal weights; tokens that other "
        "weights have sampled; and what truncation would add, were sampling not replayed.",
        x_title=run.step_name,
        y_title="nats",
        series=[
            area_of(words, run.curves[f"{_GAP}/{name}"], run.curves[f"{_GAP}/mean"], f"part-{number}")
            for number, (name, words) in enumerate(_SOURCES.items(), 1)
            if run.has(f"{_GAP}/{name}")
        ],
    )


def _lengths(runs: Sequence[Run]) -> Chart:
    series: list[Series] = []
    for index, run in enumerate(runs):
        names = [f"completions/{each}_length" for each in ("min", "mean", "max")]
        if not all(name in run.curves for name in names):
            continue
        low, mean, high = (run.curves[name] for name in names)
        colour = run_colour(index)
        if len(runs) == 1:
            band = series_of("shortest to longest", high, colour, "band")
            series.append(replace(band, low=list(thinned(low).values())))
        series += step_series(run, runs, mean, colour)
    extent = ", from the shortest to the longest" if len(runs) == 1 else ""
    return Chart(
        id="lengths",
        title="Lengths",
        caption=f"Tokens of an answer: the mean of each step{extent}.",
        x_title=runs[0].step_name,
        y_title="tokens",
        series=series,
    )
