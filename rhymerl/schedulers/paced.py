"""Groups similar lengths and cuts by time: the first free worker gets the longest answers, and none too many."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from rhymerl.errors import require
from rhymerl.schedulers.predicting import Piece, queue_of
from rhymerl.schedulers.releases import ReleaseAwareScheduler
from rhymerl.types import FloatArray, RolloutRequest

_HALVINGS = 30
_RISK = 0.95  # the quantile of growth by which long answers are expected to outgrow their prediction


@dataclass(kw_only=True, eq=False)
class PacedScheduler(ReleaseAwareScheduler):
    """Pieces sorted by predicted length fill one worker after another, the one that is free first with the longest.

    A queue takes as much as its worker finishes, as predicted, by a time that is the same for all: the earliest by
    which everything fits. While workers run ahead, a step goes to the share `workers` of them that is free first. With
    half of them the halves take turns, so that every answer may take as long as two steps and starts at their
    beginning. `max_running` is how many requests a worker decodes side by side; None is what its backend says.
    """

    workers: float = 0.5
    max_running: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 < self.workers <= 1, "workers", self.workers, "above 0 and at most 1")
        is_number = self.max_running is None or self.max_running >= 1
        require(is_number, "max_running", self.max_running, "at least 1, or null")

    def plan(self, requests: Sequence[RolloutRequest], num_workers: int, step: int) -> list[list[RolloutRequest]]:
        free = self.releases(step, num_workers)
        used = num_workers if self.unfinished(step) is None else max(round(self.workers * num_workers), 1)
        first = np.argsort(free, kind="stable")[:used]
        pieces = sorted(self.pieces(requests, num_workers), key=lambda piece: (-piece.duration, -piece.tail))
        ends = self._ends(pieces, free[first])
        queues: list[list[RolloutRequest]] = [[] for _ in range(num_workers)]
        start = 0
        for worker, end in zip(first.tolist(), ends, strict=True):
            queues[worker] = queue_of(pieces[start:end])
            start = end
        return queues

    def _ends(self, pieces: Sequence[Piece], free: FloatArray) -> list[int]:
        risk = max(self.lengths.growth(_RISK), 1.0)
        limit = max((piece.requests[0].sampling.max_tokens for piece in pieces), default=0)
        tails = np.minimum([risk * piece.tail for piece in pieces], limit) + [piece.wait for piece in pieces]
        tails = np.maximum.accumulate(tails[::-1])[::-1]  # a shorter prompt may have the longer tail
        table = _PieceTable(
            tails=tails.tolist(),
            totals=[0.0, *accumulate(piece.total for piece in pieces)],
            counts=[0, *accumulate(len(piece.requests) for piece in pieces)],
        )
        longest = max([limit, *table.tails[:1]])
        low, high = float(free.min()), float(free.max()) + self._enough(longest, table.totals[-1])
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            fits = self._fill(table, free.tolist(), middle)[-1] == len(pieces)
            low, high = (low, middle) if fits else (middle, high)
        return self._fill(table, free.tolist(), high)

    def _enough(self, longest: float, total: float) -> float:
        """Return the time in which one worker certainly finishes everything."""
        passes = longest + (total / self.max_running if self.max_running else 0.0)
        return 1.01 * self.cost.time(passes, passes * (self.max_running or 0) + total) + 1

    def _fill(self, table: _PieceTable, free: Sequence[float], by: float) -> list[int]:
        """Return where each worker's run of pieces ends when all are to finish by a time."""
        ends, start, num_pieces = [], 0, len(table.tails)
        per_tail, per_token = self.cost.time(1.0, 0.0), max(self.cost.time(0.0, 1.0), 1e-12)
        for release in free:
            if start < num_pieces:
                left = by - release - per_tail * table.tails[start]
                end = table.end(table.totals, start, left / per_token)
                if self.max_running is not None:
                    end = min(end, self._end_by_slots(table, start, by - release, self.max_running))
                start = max(start, end)
            ends.append(start)
        return ends

    def _end_by_slots(self, table: _PieceTable, start: int, left: float, slots: int) -> int:
        """Return where the stretch from `start` ends: after as many requests as run side by side, or more.

        There are more if slots that are always taken, and the longest answer after that, take no longer.
        """
        passes = left / self.cost.time(1.0, slots) - table.tails[start]
        return max(table.end(table.counts, start, slots), table.end(table.totals, start, passes * slots))


@dataclass(frozen=True, slots=True, kw_only=True)
class _PieceTable:
    """n pieces in the order in which they are given out."""

    tails: Sequence[float]  # [n] the longest answer of a run that starts here
    totals: Sequence[float]  # [n + 1] predicted tokens in front of each
    counts: Sequence[int]  # [n + 1] requests in front of each

    def end(self, sums: Sequence[float], start: int, limit: float) -> int:
        """Return the end of the longest run from `start` whose sum stays within a limit."""
        return max(bisect_right(sums, sums[start] + limit) - 1, start) if limit > 0 else start
