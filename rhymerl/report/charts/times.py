"""Charts of time: the parts of a step, how busy workers were, and how fast tokens came."""

from __future__ import annotations

from collections.abc import Sequence

from rhymerl.report.base import Run
from rhymerl.report.charts.base import Chart, area_of, line_charts, of_run

_PARTS = {  # in the order of a step
    "rollout": "rollout",
    "reward": "waiting for rewards",
    "old_log_prob": "log-probs of the policy before",
    "ref": "reference",
    "values": "critic",
    "advantage": "advantages",
    "update": "update",
}
_SPEEDS = {
    "rollout/tokens_per_s": ("Rollout speed", "Response tokens a second of the rollout.", "tokens a second"),
    "rollout/bubble_frac": (
        "Bubbles",
        "Share of the workers' time in rollouts in which they had nothing to decode.",
        "share of time",
    ),
}
_REST = "the rest"
_COLOURS = {"rollout": "rollout", "update": "update", _REST: "rest"}  # of parts; others have numbers


def time_charts(runs: Sequence[Run]) -> list[Chart]:
    """Return the charts of this section."""
    return [
        *(_parts(run, runs) for run in runs if "timing_s/step" in run.curves),
        *line_charts(runs, _SPEEDS),
    ]


def _parts(run: Run, runs: Sequence[Run]) -> Chart:
    whole = run.curves["timing_s/step"]
    curves = {words: run.curves.get(f"timing_s/{name}") for name, words in _PARTS.items()}
    known = {words: curve for words, curve in curves.items() if curve is not None}
    rest = {
        step: max(seconds - sum(part.get(step, 0.0) for part in known.values()), 0.0) for step, seconds in whole.items()
    }
    series = []
    for number, (words, part) in enumerate({**known, _REST: rest}.items()):
        shown = area_of(words, part, whole, f"part-{_COLOURS.get(words, number)}")
        if max(shown.y, default=0.0) > 0.005 * max(whole.values()):  # others would be lines without a height
            series.append(shown)
    return Chart(
        id=f"parts-{runs.index(run)}",
        title=of_run("Time by part", run, runs),
        caption="Seconds of each step, one part on top of the other. Parts below half a per cent of the longest step are left out.",
        x_title=run.step_name,
        y_title="seconds",
        series=series,
    )
