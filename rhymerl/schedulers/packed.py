"""Longest processing time first, to the worker that would finish first: the least bubbles."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from rhymerl.schedulers.base import Move, Progress
from rhymerl.schedulers.costs import Points
from rhymerl.schedulers.predicting import PredictingScheduler
from rhymerl.schedulers.releases import releases
from rhymerl.types import RolloutRequest


class PackedScheduler(PredictingScheduler):
    """The longest piece goes to the worker that is free first, counting what it still has of the step before."""

    def __init__(
        self,
        *,
        keep_groups: bool = True,
        costs: str | Points | None = None,
        momentum: float = 0.5,
        tail: float = 0.95,
    ) -> None:
        super().__init__(keep_groups=keep_groups, costs=costs, momentum=momentum, tail=tail)
        self._progress: Progress | None = None

    def rebalance(self, progress: Progress) -> list[Move]:
        """Moves nothing; keeps the progress for the next plan."""
        self._progress = progress
        return []

    def plan(self, requests: Sequence[RolloutRequest], num_workers: int, step: int) -> list[list[RolloutRequest]]:
        progress = self._progress if self._progress is not None and self._progress.step == step - 1 else None
        free = releases(progress, num_workers, self.lengths, self.cost)
        queues: list[list[RolloutRequest]] = [[] for _ in range(num_workers)]
        tops = [0.0] * num_workers
        ends = [(end, worker) for worker, end in enumerate(free.tolist())]
        heapq.heapify(ends)
        for piece in sorted(self.pieces(requests, num_workers), key=lambda piece: -piece.median):
            end, worker = ends[0]
            queues[worker].extend(piece.requests)
            longer = max(piece.tail - tops[worker], 0.0)
            tops[worker] += longer
            heapq.heapreplace(ends, (end + self.cost.time(longer, piece.total), worker))
        return queues
