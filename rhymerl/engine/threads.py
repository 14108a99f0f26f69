"""The number of threads for a forward pass on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

# Waking other threads for each of a model's products costs more than they bring when all of them take about a
# millisecond. By work and not by time, so that a run repeats bit for bit.
_FEW = 5e7  # multiplications and additions


@contextmanager
def threads_for(operations: float) -> Iterator[None]:
    """One thread for a pass of few floating-point operations; torch's own number is restored afterwards."""
    usual = torch.get_num_threads()
    if operations > _FEW or usual == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(usual)
