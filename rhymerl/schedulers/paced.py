"""Like lengths together, cut by time: whoever is free first gets the longest answers, and nobody gets more than fits."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np

from rhymerl.schedulers.base import Move, Progress
from rhymerl.schedulers.costs import Points
from rhymerl.schedulers.predicting import Piece, PredictingScheduler, queue_of
from rhymerl.schedulers.releases import releases
from rhymerl.types import RolloutRequest

if TYPE_CHECKING:
    from rhymerl.types import FloatArray


_HALVINGS = 30
_RISK = 0.95  # the quantile of growth by which long answers are expected to outgrow their prediction


class PacedScheduler(PredictingScheduler):
    """Pieces sorted by predicted length fill one worker after another, the one that is free first with the longest.

    A queue takes as much as its worker finishes, as predicted, by a time that is the same for all: the earliest by which
    everything fits. While workers run ahead, a step goes to the share `workers` of them that is free first. With half of them
    the halves take turns, so that every answer may take as long as two steps and starts at their beginning.
    """

    def __init__(
        self,
        *,
        workers: float = 0.5,
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
        used = num_workers if progress is None else max(round(self.workers * num_workers), 1)
        first = np.argsort(free, kind="stable")[:used]
        pieces = sorted(self.pieces(requests, num_workers), key=lambda piece: (-piece.median, -piece.tail))
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
        tails = np.minimum([risk * piece.tail for piece in pieces], limit)
        tails = np.maximum.accumulate(tails[::-1])[::-1]  # a shorter prompt may have the longer tail
        totals = [0.0, *accumulate(piece.total for piece in pieces)]
        enough = self.cost.time(float(limit), 1.01 * totals[-1] + 1)
        low, high = float(free.min()), float(free.max()) + enough
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            fits = self._fill(tails.tolist(), totals, free.tolist(), middle)[-1] == len(pieces)
            low, high = (low, middle) if fits else (middle, high)
        return self._fill(tails.tolist(), totals, free.tolist(), high)

    def _fill(self, tails: Sequence[float], totals: Sequence[float], free: Sequence[float], by: float) -> list[int]:
        """Where each worker's run of pieces ends when all are to finish by a time."""
        ends, start = [], 0
        per_tail, per_token = self.cost.time(1.0, 0.0), max(self.cost.time(0.0, 1.0), 1e-12)
        for release in free:
            if start < len(tails):
                left = by - release - per_tail * tails[start]
                if left > 0:
                    start = min(bisect_right(totals, totals[start] + left / per_token) - 1, len(tails))
            ends.append(start)
        return ends
