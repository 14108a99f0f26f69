"""Longest (or shortest) predicted first, each to the worker with the least to do."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rhymerl.errors import require
from rhymerl.schedulers.predicting import Piece, PredictingScheduler, latest_first, queue_of
from rhymerl.types import RolloutRequest


@dataclass(kw_only=True, eq=False)
class SortedScheduler(PredictingScheduler):
    """Pieces in the `order` of their predicted length, each to the worker with the fewest predicted tokens so far."""

    order: Literal["descending", "ascending"] = "descending"

    def __post_init__(self) -> None:
        require(self.order in ("descending", "ascending"), "order", self.order, "one of descending, ascending")
        super().__post_init__()

    def plan(self, requests: Sequence[RolloutRequest], num_workers: int, step: int) -> list[list[RolloutRequest]]:
        pieces = self.pieces(requests, num_workers)
        if self.order == "descending":
            return longest_first(pieces, num_workers)
        return list(map(queue_of, _dealt(sorted(pieces, key=lambda piece: piece.median), num_workers)))


def longest_first(pieces: Sequence[Piece], num_workers: int) -> list[list[RolloutRequest]]:
    """Return a queue a worker: the longest predicted piece first, each to the worker with the fewest tokens so far."""
    return list(map(latest_first, _dealt(sorted(pieces, key=lambda piece: -piece.median), num_workers)))


def _dealt(pieces: Sequence[Piece], num_workers: int) -> list[list[Piece]]:
    queues: list[list[Piece]] = [[] for _ in range(num_workers)]
    loads = [(0.0, worker) for worker in range(num_workers)]
    for piece in pieces:
        load, worker = loads[0]
        queues[worker].append(piece)
        heapq.heapreplace(loads, (load + piece.total, worker))
    return queues
