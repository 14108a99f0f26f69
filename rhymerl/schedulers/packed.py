"""Longest processing time first, to the worker that would finish first: the least bubbles."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from rhymerl.schedulers.predicting import Piece, latest_first
from rhymerl.schedulers.queue_cost import QueueLoad
from rhymerl.schedulers.releases import ReleaseAwareScheduler
from rhymerl.types import RolloutRequest


class PackedScheduler(ReleaseAwareScheduler):
    """The longest piece goes to the worker that is free first, counting what it still has of the step before."""

    def plan(self, requests: Sequence[RolloutRequest], num_workers: int, step: int) -> list[list[RolloutRequest]]:
        free = self.releases(step, num_workers).tolist()
        queues: list[list[Piece]] = [[] for _ in range(num_workers)]
        loads = [QueueLoad(self.max_running) for _ in range(num_workers)]
        ends = [(end, worker) for worker, end in enumerate(free)]
        heapq.heapify(ends)
        for piece in sorted(self.pieces(requests, num_workers), key=lambda piece: -piece.median):
            _, worker = ends[0]
            queues[worker].append(piece)
            load = loads[worker]
            load.add(len(piece.requests), piece.median, piece.tail)
            heapq.heapreplace(ends, (free[worker] + self.cost.time(load.passes, load.total), worker))
        return list(map(latest_first, queues))
