"""Shared parts of other systems' rules beside Scheduler: reordered waiting requests, and steps that end early."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from rhymerl.schedulers import Move, Progress, Scheduler
from rhymerl.types import RolloutRequest

Group = Sequence[RolloutRequest]  # all answers to a prompt that may be asked for


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


class EarlyStopScheduler(Scheduler):
    """A scheduler that also says what a step launches and when it ends.

    rhymerl's Scheduler has no such hooks, and is not to have them: its plan is a partition of the step's requests, and
    a step ends when all of them are answered, so that no rule can change which answers are trained on. Training refuses
    a plan that is none; these rules run in tournament.py alone. Hooks are called in this order: `launch`, `plan`,
    `finished` for each answer as it ends (`rebalance` from time to time), `trained`.
    """

    def __init__(self, *, prompts: int, group_size: int) -> None:
        self.prompts = prompts  # to train on in a step
        self.group_size = group_size  # answers to each

    @abstractmethod
    def launch(self, groups: Iterator[Group]) -> list[RolloutRequest]:
        """Return the requests of this step; `groups` are the prompts that were not launched yet, in data order.

        A request that is launched again goes on from the tokens that it had.
        """

    @abstractmethod
    def finished(self, request: RolloutRequest) -> bool:
        """Note that an answer has ended, and return whether the step is over."""

    @abstractmethod
    def trained(self) -> list[RolloutRequest]:
        """Return the answers to train on when the step is over; all requests that have not ended are stopped."""

    def plan(self, requests: Sequence[RolloutRequest], num_workers: int, step: int) -> list[list[RolloutRequest]]:
        """Every request goes to the worker with the fewest."""
        return [list(requests[worker::num_workers]) for worker in range(num_workers)]

    def rebalance(self, progress: Progress) -> list[Move]:
        """Waiting requests are shared by all workers, in the order of launch."""
        if not is_uneven(progress):
            return []
        order = {request.id: number for number, request in enumerate(progress.requests)}
        return redeal(progress, lambda request: order[request.id])
