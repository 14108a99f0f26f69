"""The results of a simulation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rhymerl.simulation.base import Timeline
from rhymerl.types import FloatArray

_QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The steps `first` to `last` (not included): from the end of the one before to the end of the last of them."""

    first: int
    last: int

    def bounds(self, timeline: Timeline) -> tuple[float, float]:
        return (float(timeline.done[self.first - 1]) if self.first else 0.0), float(timeline.done[self.last - 1])


def step_time(timeline: Timeline, window: Window, train_time: float) -> float:
    """Return the time of a step within the window; `train_time` is what stops all workers."""
    start, end = window.bounds(timeline)
    return (end - start) / (window.last - window.first) + train_time


def summary(timeline: Timeline, window: Window, *, train_time: float) -> dict[str, float]:
    """Return the figures of the steps in the window, in steps; later steps only keep workers busy until its end.

    `train_time` is what stops all workers in each step, and is no bubble.
    """
    start, end = window.bounds(timeline)
    kept, num_steps = slice(window.first, window.last), window.last - window.first
    num_workers = timeline.starts.shape[1]
    spent = (np.minimum(timeline.ends, end) - np.maximum(timeline.starts, start)).clip(min=0).sum()
    ahead_starts = timeline.ends
    ahead = (np.minimum(ahead_starts + timeline.ahead, end) - np.maximum(ahead_starts, start)).clip(min=0).sum()
    offered = num_workers * (end - start + num_steps * train_time)
    pace = step_time(timeline, window, train_time)
    tokens = float(timeline.tokens[kept].sum())
    return {
        "step_time": pace,
        "tokens_per_time": tokens / (num_steps * pace),
        "bubble_frac": float(1 - (spent + ahead + num_workers * num_steps * train_time) / offered),
        "run_ahead_frac": float(ahead / offered),
        "tail_frac": float(
            timeline.tails[kept].sum() / max(float((timeline.ends - timeline.starts)[kept].sum()), 1e-9)
        ),
        "migration_rate": float(timeline.moves[kept].sum() / sum(map(len, timeline.waits[kept]))),
        "staleness_max": int(timeline.staleness[kept].max()),
        "stale_token_frac": float(timeline.stale_tokens[kept].sum() / tokens),
        **_spread("wait", timeline.waits[kept], pace),
        **_spread("latency", timeline.latencies[kept], pace),
    }


def _spread(name: str, times: Sequence[FloatArray], pace: float) -> dict[str, float]:
    values = np.quantile(np.concatenate(times), list(_QUANTILES.values())) / pace
    return {f"{name}_{quantile}": float(value) for quantile, value in zip(_QUANTILES, values, strict=True)}
