"""Charts of how well a run does: small ones side by side, for a look whether anything goes out of hand."""

from __future__ import annotations

from collections.abc import Sequence

from rhymerl.report.base import Run
from rhymerl.report.charts.base import Chart, line_chart


def health_charts(runs: Sequence[Run]) -> list[Chart]:
    """Return the charts of this section."""
    return [
        _small(runs, "entropy", "Entropy", "Of the policy at trained tokens; near 0 it explores no more.", "nats"),
        _small(runs, "kl", "KL", "Divergence from the reference at trained tokens.", "nats"),
        _small(runs, "grad_norm", "Gradient norm", "Before clipping.", "norm"),
        _small(
            runs, "clip_ratio/region_mean", "Clip share", "Trained tokens beyond the clip range.", "share of tokens"
        ),
        line_chart(
            runs,
            "learning_rate",
            title="Learning rate",
            caption="Of the policy's optimizer.",
            y_title="rate",
            is_smoothed=False,
        ),
        _small(
            runs,
            "frac_reward_zero_std",
            "Groups without signal",
            "Prompts whose answers all have the same reward: they teach nothing.",
            "share of prompts",
        ),
    ]


def _small(runs: Sequence[Run], metric: str, title: str, caption: str, y_title: str) -> Chart:
    return line_chart(runs, metric, title=title, caption=caption, y_title=y_title)
