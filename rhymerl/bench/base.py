"""The parts that the benchmarks share: ratios of paired, interleaved runs, and where the figures came from."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import numpy as np

from rhymerl.distributed.cores import usable_cores

_RESAMPLES = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedRatio:
    """The speed-up over pairs measured side by side."""

    median: float
    low: float  # of the median's 95 % interval
    high: float

    @classmethod
    def of(cls, baseline: Sequence[float], measured: Sequence[float]) -> SpeedRatio:
        """Build it from seconds of the same work, pair by pair; the interval is the bootstrap's."""
        ratios = np.array(baseline) / np.array(measured)
        draws = np.random.default_rng(0).choice(ratios, (_RESAMPLES, len(ratios)))
        low, high = np.quantile(np.median(draws, axis=1), [0.025, 0.975])
        return cls(median=float(np.median(ratios)), low=float(low), high=float(high))


def environment() -> dict[str, Any]:
    """Return the hardware and versions."""
    packages = ("rhymerl", "torch", "transformers", "numpy", "numba")
    return {
        "cpu": platform.processor() or platform.machine(),
        "cores": usable_cores(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in packages},
        "load": [round(each, 2) for each in os.getloadavg()],
    }
