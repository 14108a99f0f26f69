"""Passes that answers take without drafts: requests enter in order as slots free up; each pass adds one token each."""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappush, heapreplace
from typing import Self, TypeVar

import numpy as np

from rhymerl.costs import PassCost
from rhymerl.types import FloatArray, IndexArray

Amounts = TypeVar("Amounts", IndexArray, FloatArray)


@dataclass(frozen=True, slots=True)
class PlainPasses:
    """Passes without drafts, in their order."""

    rows: IndexArray  # [P] requests that run in each
    seen: IndexArray | FloatArray  # [P] keys that these attend to, summed

    @classmethod
    def of(cls, lengths: IndexArray, contexts: IndexArray, slots: int) -> Self:
        """Return the passes of requests, [R], with `lengths` tokens after `contexts` tokens, in so many `slots`."""
        starts = starts_of(lengths, slots)
        rows = rows_of(starts, lengths)
        offsets = contexts - starts  # a row sees its context and what it has sampled: context - start + pass
        seen = _running(starts, starts + lengths, offsets) + rows * np.arange(len(rows))
        return cls(rows, seen)

    def seconds(self, cost: PassCost) -> float:
        """Return the time of all of them."""
        return float(cost.seconds(self.rows, 0 * self.rows, 0 * self.rows, seen=self.seen).sum())


def starts_of(lengths: Amounts, slots: int) -> Amounts:
    """Return the pass in which each request enters, [R], in order, where each takes as many passes as its length."""
    starts: list[float] = []
    ends: list[float] = []  # a heap
    for each in lengths.tolist():
        starts.append(0 if len(ends) < slots else ends[0])
        (heappush if len(ends) < slots else heapreplace)(ends, starts[-1] + each)
    return np.array(starts, lengths.dtype)


def rows_of(starts: IndexArray, lengths: IndexArray) -> IndexArray:
    """Return by pass, [P], the requests that run in it."""
    return _running(starts, starts + lengths, np.ones_like(starts))


def _running(starts: IndexArray, ends: IndexArray, values: IndexArray) -> IndexArray:
    """Return by pass, [P], the sum of `values` [R] over the requests that run in it."""
    size = int(ends.max(initial=0)) + 1
    changes = np.bincount(starts, values, size) - np.bincount(ends, values, size)
    running: IndexArray = np.cumsum(changes)[:-1].astype(np.int64)
    return running
