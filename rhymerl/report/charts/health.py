"""Charts of how well a run does: small ones side by side, for a look whether anything goes out of hand."""

from __future__ import annotations

from collections.abc import Sequence

from rhymerl.report.base import Run
from rhymerl.report.charts.base import Chart, line_charts

_CHARTS = {  # by metric: title, caption and unit
    "entropy": ("Entropy", "Of the policy at trained tokens; near 0 it explores no more.", "nats"),
    "kl": ("KL", "Divergence from the reference at trained tokens.", "nats"),
    "grad_norm": ("Gradient norm", "Before clipping.", "norm"),
    "clip_ratio/region_mean": ("Clip share", "Trained tokens beyond the clip range.", "share of tokens"),
    "learning_rate": ("Learning rate", "Of the policy's optimizer.", "rate"),
    "frac_reward_zero_std": (
        "Groups without signal",
        "Prompts whose answers all have the same reward: they teach nothing.",
        "share of prompts",
    ),
}


def health_charts(runs: Sequence[Run]) -> list[Chart]:
    """Return the charts of this section."""
    return [
        chart
        for name, words in _CHARTS.items()
        for chart in line_charts(runs, {name: words}, is_smoothed=name != "learning_rate")
    ]
