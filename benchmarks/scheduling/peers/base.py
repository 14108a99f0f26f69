"""What rules of other systems share beside Scheduler: waiting requests in one order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from rhymerl.schedulers import Move, Progress
from rhymerl.types import RolloutRequest


def redeal(progress: Progress, priority: Callable[[RolloutRequest], Any]) -> list[Move]:
    """Return moves that sort waiting requests behind running ones by ascending priority, as many on each worker.

    This stands in for a queue that all workers share. A moved request goes to the end of its new worker's queue, and
    one that stays keeps its place; so all that wait change workers.
    """
    num_workers = len(progress.planned)
    if num_workers == 1:
        return []
    loads = np.bincount(progress.workers[progress.num_tokens > 0], minlength=num_workers).tolist()
    waiting = np.flatnonzero(progress.num_tokens == 0).tolist()
    moves: list[Move] = []
    for index in sorted(waiting, key=lambda index: priority(progress.requests[index])):
        here = int(progress.workers[index])
        target = min((load, worker) for worker, load in enumerate(loads) if worker != here)[1]
        loads[target] += 1
        moves.append(Move(request_id=progress.requests[index].id, worker=target))
    return moves


def is_uneven(progress: Progress) -> bool:
    """Return whether requests wait on one worker, at least two more than on another."""
    waiting = np.bincount(progress.workers[progress.num_tokens == 0], minlength=len(progress.planned))
    return int(waiting.max() - waiting.min()) > 1
