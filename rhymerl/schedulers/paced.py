"""Like lengths together, cut by time: whoever is free first gets the longest answers, and nobody gets more than fits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from rhymerl.schedulers.base import Move, Progress
from rhymerl.schedulers.costs import Points
from rhymerl.schedulers.predicting import Piece, PredictingScheduler, queue_of
from rhymerl.schedulers.releases import releases
from rhymerl.types import RolloutRequest

if TYPE_CHECKING:
    from rhymerl.types import FloatArray


class PacedScheduler(PredictingScheduler):
    """Pieces sorted by predicted length fill one worker after another, the one that is free first with the longest.

    A queue takes as much as its worker finishes, as predicted, by a time that is the same for all: the earliest by which
    everything fits on the share `workers` of all workers, those that are free first. With half of them and run-ahead, the
    halves take turns: every answer of a step may then take as long as two steps, and starts at once.
    """

    def __init__(
        self,
        *,
        workers: float = 1.0,
        keep_groups: bool = True,
        costs: str | Points | None = None,
        momentum: float = 0.5,
        tail: float = 0.95,
    ) -> None:
        super().__init__(keep_groups=keep_groups, costs=costs, momentum=momentum, tail=tail)
        if not 0 < workers <= 1:
            raise ValueError(f"workers={workers}: expected above 0 and at most 1")
        self.workers = workers
        self._progress: Progress | None = None

    def rebalance(self, progress: Progress) -> list[Move]:
        """Moves nothing; keeps the progress for the next plan."""
        self._progress = progress
        return []

    def plan(self, requests: Sequence[RolloutRequest], num_workers: int, step: int) -> list[list[RolloutRequest]]:
        progress = self._progress if self._progress is not None and self._progress.step == step - 1 else None
        free = releases(progress, num_workers, self.lengths, self.cost)
        first = np.argsort(free, kind="stable")[: max(round(self.workers * num_workers), 1)]
        pieces = sorted(self.pieces(requests, num_workers), key=lambda piece: (-piece.median, -piece.tail))
        ends = self._ends(pieces, free[first])
        queues: list[list[RolloutRequest]] = [[] for _ in range(num_workers)]
        start = 0
        for worker, end in zip(first.tolist(), ends, strict=True):
            queues[worker] = queue_of(pieces[start:end])
            start = end
        return queues

    def _ends(self, pieces: Sequence[Piece], free: FloatArray) -> list[int]:
        tails = np.maximum.accumulate(np.array([piece.tail for piece in pieces])[::-1])[::-1]
        totals = np.concatenate([[0.0], np.cumsum([piece.total for piece in pieces])])
        low, high = float(free.min()), float(free.max()) + self.cost.time(float(tails[0]), float(totals[-1]))
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (low, middle) if self._fill(tails, totals, free, middle)[-1] == len(pieces) else (middle, high)
        return self._fill(tails, totals, free, high)

    def _fill(self, tails: FloatArray, totals: FloatArray, free: FloatArray, by: float) -> list[int]:
        """Where each worker's run of pieces ends when all are to finish by a time."""
        ends, start, per_token = [], 0, self.cost.time(0.0, 1.0)
        for release in free.tolist():
            if start < len(tails):
                left = by - release - self.cost.time(float(tails[start]), 0.0)
                if left > 0:
                    start = int(np.searchsorted(totals, totals[start] + left / per_token, side="right")) - 1
            ends.append(min(start, len(tails)))
        return ends
