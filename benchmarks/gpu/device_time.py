"""Times of work on the GPU where there is one, else on the CPU."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def sync() -> None:
    if device() == "cuda":
        torch.cuda.synchronize()


def milliseconds(work: Callable[[], object], *, repeats: int, calls: int = 1, warm_up: int = 2) -> list[float]:
    """Return `repeats` times of a call, each the mean of `calls` in a row, until the device is done with them."""
    taken = []
    for _ in range(warm_up + repeats):
        sync()
        began = time.perf_counter()
        for _ in range(calls):
            work()
        sync()
        taken.append(1e3 * (time.perf_counter() - began) / calls)
    return taken[warm_up:]
