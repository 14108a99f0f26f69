"""The charts of a report as PNG files, one a chart."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rhymerl.errors import ConfigError, require_package
from rhymerl.folders import writing
from rhymerl.report.base import Run
from rhymerl.report.charts import Chart, Series, sections_of
from rhymerl.report.colours import COLOURS
from rhymerl.report.timeline import RunTimeline, timeline_of

_SHOWN_STEPS = 5  # of a timeline


def check_matplotlib(setting: str = "pictures") -> None:
    """Raise ConfigError where pictures cannot be made."""
    require_package("matplotlib", f"{setting}: drawing charts")


def check_picture(setting: str, path: Path) -> None:
    """Raise ConfigError when no picture can be written there, or at all."""
    if path.suffix != ".png":
        raise ConfigError(f"{setting}={str(path)!r}: expected a file that ends in .png")
    check_matplotlib(setting)


def draw_chart(chart: Chart, path: Path) -> None:
    """Write a chart as PNG."""
    import matplotlib

    with matplotlib.rc_context({"text.parse_math": False}):  # a dollar in a name is a dollar
        _save(_chart(chart), path)


def draw_pictures(runs: Sequence[Run], folder: Path) -> list[Path]:
    """Write a picture of each chart and timeline of the report on these runs; returns the files."""
    check_matplotlib()
    import matplotlib

    charts = [chart for charts in sections_of(runs).values() for chart in charts]
    with matplotlib.rc_context({"text.parse_math": False}):  # a dollar in a name is a dollar
        pictures = [_save(_chart(chart), folder / f"{chart.id}.png") for chart in charts]
        for number, run in enumerate(runs):
            timeline = timeline_of(run)
            if timeline is not None:
                pictures.append(_save(_timeline(timeline, run.name), folder / f"timeline-{number}.png"))
    return pictures


def _save(figure: Any, path: Path) -> Path:
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=140)
    return path


def _figure(title: str, caption: str, height: float) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, height), layout="constrained")
    axis = figure.subplots()
    axis.set_title(title, loc="left", fontsize=12, fontweight="bold", color=_light("ink"))
    axis.spines[["top", "right"]].set_visible(False)
    axis.spines[["left", "bottom"]].set_color(_light("rule"))
    axis.tick_params(colors=_light("muted"), labelsize=9)
    figure.supxlabel(caption, fontsize=8, color=_light("muted"), x=0.02, ha="left", wrap=True)
    return figure, axis


def _chart(chart: Chart) -> Any:
    figure, axis = _figure(chart.title, chart.caption, 3.8)
    axis.grid(axis="y", color=_light("rule"), linewidth=0.8)
    axis.set_axisbelow(True)
    areas = [series for series in chart.series if series.kind == "area"]
    if areas:
        axis.stackplot(
            areas[0].x,
            *(series.y for series in areas),
            labels=[series.name for series in areas],
            colors=[_light(series.colour) for series in areas],
            alpha=0.8,
        )
    bars = [series for series in chart.series if series.kind == "bars"]
    for number, series in enumerate(bars):
        width = 0.8 / len(bars)
        left = [x + (number - (len(bars) - 1) / 2) * width for x in series.x]
        axis.bar(left, series.y, width=width, label=series.name, color=_light(series.colour))
    for series in chart.series:
        _draw(axis, series)
    if chart.reference is not None:
        axis.axhline(chart.reference, color=_light("muted"), linewidth=0.8, linestyle=":")
    if chart.from_zero:
        axis.set_ylim(bottom=min(0, axis.get_ylim()[0]))
    axis.set_xlabel(chart.x_title, fontsize=9, color=_light("muted"))
    axis.set_ylabel(chart.y_title, fontsize=9, color=_light("muted"))
    if len(chart.series) > 1:
        axis.legend(frameon=False, fontsize=8)
    return figure


def _draw(axis: Any, series: Series) -> None:
    colour = _light(series.colour)
    match series.kind:
        case "line":
            axis.plot(series.x, series.y, color=colour, linewidth=1.8, label=series.name)
        case "dots":
            axis.plot(series.x, series.y, ".", color=colour, alpha=0.4, label=series.name)
        case "marks":
            axis.plot(series.x, series.y, "D", color=colour, markeredgecolor="white", markersize=7, label=series.name)
        case "band":
            axis.fill_between(series.x, series.low or series.y, series.y, color=colour, alpha=0.16, label=series.name)


def _timeline(timeline: RunTimeline, name: str) -> Any:
    caption = "What is empty is a bubble; lines are the ends of steps, ticks new weights."
    figure, axis = _figure(f"Timeline: {name}", caption, 1.6 + 0.35 * len(timeline.rows))
    for kind, label in timeline.kinds.items():
        bars = [bar for bar in timeline.bars if bar.kind == kind]
        widths, starts = [bar.end_s - bar.start_s for bar in bars], [bar.start_s for bar in bars]
        axis.barh([bar.row for bar in bars], widths, left=starts, height=0.7, color=_light(f"bar-{kind}"), label=label)
    weights = [bar for bar in timeline.bars if bar.kind == "weights"]
    axis.plot([bar.end_s for bar in weights], [bar.row for bar in weights], "|", color=_light("bar-weights"))
    ends = [end for _, end in timeline.step_ends]
    for end in ends:
        axis.axvline(end, color=_light("rule"), linewidth=0.8, zorder=0)
    axis.set_xlim(ends[-1 - _SHOWN_STEPS] if len(ends) > _SHOWN_STEPS else 0, ends[-1] * 1.002)
    axis.set_yticks(range(len(timeline.rows)), timeline.rows)
    axis.invert_yaxis()
    axis.set_xlabel("seconds", fontsize=9, color=_light("muted"))
    figure.legend(loc="outside upper right", frameon=False, fontsize=8, ncols=4)
    return figure


def _light(name: str) -> str:
    return COLOURS[name][0]
