"""Longest first: list scheduling in the order of predicted length, from one queue that all workers share."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from benchmarks.scheduling.peers.base import is_uneven, redeal
from rhymerl.schedulers import Move, Progress
from rhymerl.schedulers.predicting import PredictingScheduler
from rhymerl.types import RolloutRequest


class LongestFirstScheduler(PredictingScheduler):
    """Single requests, the longest predicted first (Graham's LPT rule, doi 10.1137/0117039).

    No worker is without work while another has requests waiting. The lengths come from rhymerl's own predictor.
    `sorted` differs: it keeps groups together and never moves a request.
    """

    def __init__(self) -> None:
        super().__init__(keep_groups=False)

    def plan(self, requests: Sequence[RolloutRequest], num_workers: int, step: int) -> list[list[RolloutRequest]]:
        queues: list[list[RolloutRequest]] = [[] for _ in range(num_workers)]
        loads = [(0.0, worker) for worker in range(num_workers)]
        for piece in sorted(self.pieces(requests, num_workers), key=lambda piece: -piece.median):
            load, worker = loads[0]
            queues[worker] += piece.requests
            heapq.heapreplace(loads, (load + piece.total, worker))
        return queues

    def rebalance(self, progress: Progress) -> list[Move]:
        if not is_uneven(progress):
            return []
        return redeal(progress, lambda request: -self.lengths.predict(request).median)
