"""The passes of a rollout, from how many each request takes: requests enter in order, as slots become free."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from rhymerl.types import IndexArray


def starts_of(lengths: Sequence[int], slots: int) -> IndexArray:
    """Return the pass in which each request enters, [R], where each takes as many passes as its length."""
    starts: list[int] = []
    ends: list[int] = []
    for each in lengths:
        starts.append(heappop(ends) if len(ends) == slots else 0)
        heappush(ends, starts[-1] + each)
    return np.array(starts, np.int64)


def rows_of(starts: IndexArray, lengths: IndexArray) -> IndexArray:
    """Return by pass, [P], the requests that run in it."""
    ends = starts + lengths
    size = int(ends.max(initial=0)) + 1
    changes = np.bincount(starts, minlength=size) - np.bincount(ends, minlength=size)
    rows: IndexArray = np.cumsum(changes)[:-1].astype(np.int64)
    return rows
