"""A picture of workers and their trainer over time, which benchmarks of whole steps share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rhymerl.backends.spans import WorkerSpan

_COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44")


@dataclass(frozen=True, slots=True)
class Panel:
    """What is drawn of a run: from one second to another."""

    spans: Sequence[WorkerSpan]
    updates: Sequence[tuple[float, float]]
    start: float
    end: float


def draw(panels: Mapping[str, Panel], path: Path, *, clock: str) -> None:
    """Draw a panel below the other; a colour is a step."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(len(panels), 1, figsize=(11, 2.1 * len(panels)), layout="constrained", squeeze=False)
    for axis, (name, panel) in zip(axes[:, 0], panels.items(), strict=True):
        start, end = panel.start, panel.end
        for span in panel.spans:
            if span.end_s > start and span.start_s < end:
                left, colour = span.start_s - start, _COLOURS[span.number % len(_COLOURS)]
                axis.barh(span.worker, span.seconds, left=left, color=colour, height=0.8)
        top = 1 + max(span.worker for span in panel.spans)
        for begun, over in panel.updates:
            if over > start and begun < end:
                axis.barh(top, over - begun, left=begun - start, color="#999999", height=0.8)
        axis.set(xlim=(0, end - start), title=name)
        axis.set_yticks(range(top + 1), [*(f"worker {number}" for number in range(top)), "update"])
        axis.invert_yaxis()
    axes[-1, 0].set_xlabel(f"seconds{clock}, on emulated accelerators; a colour is a step")
    figure.savefig(path, dpi=110)
