"""A picture of where the workers' time goes, for the rows of headline.py."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any


def draw(rows: Sequence[dict[str, Any]], path: Path, emulated: str) -> None:
    """Draw where the workers' time goes, a step of the first row being 1."""
    import matplotlib.pyplot as plt

    parts = {
        "passes": "#4477aa",
        "nodes": "#66ccee",
        "padding": "#ddaa33",
        "draft": "#228833",
        "beside": "#ccbb44",
        "weights": "#aa3377",
        "update": "#dddddd",
        "trainer": "#888888",
        "bubbles": "#ee6677",
    }
    figure, axis = plt.subplots(figsize=(10, 0.42 * len(rows) + 1.6), layout="constrained")
    names = [row["row"] for row in rows]
    left = [0.0] * len(rows)
    for part, colour in parts.items():
        shares = [row["lost"].get(part, 1 - sum(row["lost"].values())) / row["over_barrier"] for row in rows]
        axis.barh(names, shares, left=left, color=colour, label=part)
        left = [start + share for start, share in zip(left, shares, strict=True)]
    one_step_off = rows[0]["over_one_step_off"]  # the first row's time is 1
    axis.axvspan(
        one_step_off / 2.61,
        one_step_off / 1.9,
        color="#bbbbbb",
        alpha=0.35,
        zorder=0,
        label="the paper's figure, 1.9 to 2.6 x",
    )
    for at, row in enumerate(rows):
        words = f"{row['over_barrier']:.2f} x, over one step off {row['over_one_step_off']:.2f} x"
        axis.text(left[at] + 0.01, at, words, va="center", fontsize=8)
    axis.invert_yaxis()
    axis.set(
        xlim=(0, 1.45),
        xlabel="time to the last step, first row = 1; the paper's figure is over one step off",
        title=f"Whole training runs on emulated accelerators ({emulated}), by where the workers' time goes",
    )
    axis.legend(ncols=2, loc="lower right", fontsize=8)
    figure.savefig(path, dpi=110)
