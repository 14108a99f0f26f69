"""What a report shows: charts of series."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rhymerl.report.base import Curve, Run

Kind = Literal["line", "dots", "marks", "band", "area", "bars"]

_MOST_POINTS = 2_000  # of a line: more than a page has pixels
_WINDOW = 5  # steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Values by x: `marks` are large dots; a `band` goes from `low` to `y`; `area` and `bars` are stacked."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    colour: str  # a name in rhymerl/report/colours.py
    kind: Kind = "line"
    low: Sequence[float] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """One chart; `caption` says how to read it."""

    id: str
    title: str
    caption: str
    x_title: str
    y_title: str
    series: Sequence[Series]
    reference: float | None = None  # a thin line at this y
    from_zero: bool = True


def run_colour(index: int) -> str:
    """Return the colour of a run."""
    return f"series-{index % 6}"


def thinned(curve: Curve) -> Curve:
    """Return at most some thousand points of a curve, evenly spaced, with the last one."""
    points = list(curve.items())
    stride = max(-(-len(points) // _MOST_POINTS), 1)
    return dict(points[(len(points) - 1) % stride :: stride])


def smoothed(curve: Curve) -> Curve:
    """Return the means over five steps: each with the two before and the two behind it, as far as they are there."""
    values, half = list(curve.values()), _WINDOW // 2
    windows = [values[max(0, index - half) : index + half + 1] for index in range(len(values))]
    return {step: sum(window) / len(window) for step, window in zip(curve, windows, strict=True)}


def line_charts(
    runs: Sequence[Run],
    metrics: Mapping[str, tuple[str, str, str]],
    *,
    reference: float | None = None,
    is_smoothed: bool = True,
    from_zero: bool = True,
) -> list[Chart]:
    """Return a chart of each metric, by its title, caption and unit.

    It has a line a run, of the runs that have the metric and in which it is not 0 throughout. Where it `is_smoothed`,
    the line is the mean of five steps, and steps are dots.
    """
    charts = []
    for metric, (title, caption, unit) in metrics.items():
        chosen = [run for run in runs if run.has(metric)]
        series: list[Series] = []
        for run in chosen:
            colour, curve = run_colour(runs.index(run)), run.curves[metric]
            if is_smoothed and len(curve) > _WINDOW:
                series += step_series(run, runs, curve, colour)
            else:
                series.append(series_of(run.name, curve, colour))
        chart = Chart(
            id=metric.replace("/", "-"),
            title=title,
            caption=caption,
            x_title=next((run.step_name for run in chosen), ""),
            y_title=unit,
            series=series,
            reference=reference,
            from_zero=from_zero,
        )
        charts.append(chart)
    return charts


def step_series(run: Run, runs: Sequence[Run], curve: Curve, colour: str) -> list[Series]:
    """Return the steps as dots, and the means over five of them as a line."""
    return [
        series_of(named(run, "each step", runs), curve, colour, "dots"),
        series_of(named(run, "mean of five", runs), smoothed(curve), colour),
    ]


def series_of(name: str, curve: Curve, colour: str, kind: Kind = "line") -> Series:
    """Return a curve as a series, of as many points as a page shows."""
    curve = thinned(curve)
    return Series(name=name, x=list(curve), y=list(curve.values()), colour=colour, kind=kind)


def area_of(name: str, curve: Curve, steps: Iterable[int], colour: str) -> Series:
    """Return a curve as an area over these steps, 0 where it has no value."""
    return series_of(name, {step: curve.get(step, 0.0) for step in steps}, colour, "area")


def of_run(title: str, run: Run, runs: Sequence[Run]) -> str:
    """Return the title of one of the charts that each run has."""
    return f"{title}: {run.name}" if len(runs) > 1 else title


def named(run: Run, words: str, runs: Sequence[Run]) -> str:
    """Return the name of a run's series among several of a chart."""
    return f"{run.name}, {words}" if len(runs) > 1 else words
