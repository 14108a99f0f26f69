"""Gantt charts of workers: who decodes which step when, and where nobody does."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rhymerl.simulation.base import Timeline
from rhymerl.simulation.summary import Window

_COLOURS = ("#3b6fb6", "#e08a3c", "#4c9f70", "#b5557a", "#8a78c2", "#9a8f4a")


def draw(panels: Mapping[str, Timeline], window: Window, path: Path) -> None:
    """Draw one panel a timeline, on the same time axis, as PNG.

    It has a row a worker and a colour a step, and is white where nothing is done.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(11, 1.2 + 2.9 * len(panels)), layout="constrained")
    axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for axis, (title, timeline) in zip(axes, panels.items(), strict=True):
        _panel(axis, timeline, window)
        axis.set_title(title, loc="left", fontsize=10)
        axis.set_ylabel("worker")
    axes[-1].set_xlabel("time (passes of an idle engine)")
    steps = range(window.first, window.last)
    handles: list[Any] = [Patch(color=_COLOURS[step % len(_COLOURS)], label=f"step {step}") for step in steps]
    if any(timeline.ahead.any() for timeline in panels.values()):
        handles.append(Patch(facecolor="white", edgecolor="0.5", hatch="///", label="prefetched, to be sampled again"))
    handles.append(Patch(facecolor="white", edgecolor="0.5", label="bubble"))
    figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), 7), frameon=False, fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def _panel(axis: Any, timeline: Timeline, window: Window) -> None:
    origin, _ = window.bounds(timeline)
    workers = np.arange(timeline.starts.shape[1])
    for step in range(window.first, min(window.last, len(timeline.done))):
        starts, ends = timeline.starts[step] - origin, timeline.ends[step] - origin
        axis.barh(workers, ends - starts, left=starts, height=0.9, color=_COLOURS[step % len(_COLOURS)])
        if timeline.ahead[step].any():
            colour = _COLOURS[(step + 1) % len(_COLOURS)]
            axis.barh(
                workers,
                timeline.ahead[step],
                left=ends,
                height=0.9,
                facecolor="none",
                edgecolor=colour,
                hatch="////",
                lw=0,
            )
        axis.axvline(timeline.done[step] - origin, color="0.25", lw=0.8, ls=":")
    axis.set_ylim(len(workers) - 0.5, -0.5)
    axis.set_xlim(left=0)
