"""Rank 0's view of a step: who has which request, what moves, when the next step is planned, and when all is done."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rhymerl.errors import HookError
from rhymerl.hooks import Hooks, place_of
from rhymerl.rollout.plans import SharedPlan, make_plan
from rhymerl.schedulers.base import Progress, Scheduler, check_moves
from rhymerl.types import RolloutRequest

_NEARLY = 0.1  # of a worker's requests


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a rank says, of requests by their place in the step's list."""

    finished: Sequence[int]  # since its last report
    tokens: Mapping[int, int]  # drawn so far, of those that it has


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """What all ranks are told."""

    moves: Mapping[int, int]  # place of a request -> where it goes on
    plan: SharedPlan | None = None  # of the following step
    is_done: bool = False  # everything is answered: pause


class Conductor:
    """Asks the scheduler on behalf of all ranks.

    `step` None is no training step, in which nothing moves. Else `rebalance` comes whenever `clock` (without one: the number of
    calls) has gone on by `every`, if the scheduler has it at all, and right before the plan of `following`, the next step's requests,
    which is made when a worker has nearly nothing left to do.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        requests: Sequence[RolloutRequest],
        plan: SharedPlan,
        *,
        step: int | None,
        following: Sequence[RolloutRequest] | None,
        every: float,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.num_moves = 0
        self._scheduler = scheduler
        self._requests = requests
        self._step = step
        self._following = following
        self._num_calls = 0
        self._clock = clock or (lambda: self._num_calls)
        self._every = every
        self._listens = step is not None and scheduler.listens
        self._planned = np.array([len(queue) for queue in plan.queues], np.int64)
        self._left = [dict.fromkeys(queue, 0) for queue in plan.queues]  # by worker: place -> tokens drawn
        self._worker = {place: worker for worker, queue in enumerate(plan.queues) for place in queue}
        self._asked_at = self._clock()
        self._is_done = False

    def decide(self, reports: Sequence[tuple[int, Report]]) -> Orders | None:
        """The next order, if there is anything to order."""
        self._num_calls += 1
        for _, report in reports:
            self._hear(report)
        if self._is_done:
            return None
        if not any(self._left):
            self._is_done = True
            return Orders(moves={}, is_done=True)
        if self._following is not None and any(map(self._is_nearly_done, range(len(self._left)))):
            return self._plan_following(self._following)
        if self._listens and self._clock() - self._asked_at >= self._every:
            moves = self._rebalance()
            return Orders(moves=moves) if moves else None
        return None

    def _is_nearly_done(self, worker: int) -> bool:
        return len(self._left[worker]) <= _NEARLY * int(self._planned[worker])

    def _hear(self, report: Report) -> None:
        for place, tokens in report.tokens.items():
            left = self._left[self._worker[place]]
            if place in left:
                left[place] = tokens
        for place in report.finished:
            self._left[self._worker[place]].pop(place, None)

    def _plan_following(self, following: Sequence[RolloutRequest]) -> Orders:
        assert self._step is not None
        self._following = None
        moves = self._rebalance() if self._listens else {}
        plan = make_plan(self._scheduler, following, num_workers=len(self._left), step=self._step + 1)
        return Orders(moves=moves, plan=plan)

    def _rebalance(self) -> dict[int, int]:
        """Ask what moves, and note it. Raises HookError, naming the scheduler, for a move that cannot be."""
        self._asked_at = self._clock()
        progress = self._progress()
        with Hooks("scheduler", self._scheduler):
            moves = self._scheduler.rebalance(progress)
        try:
            check_moves(moves, progress, scheduler=type(self._scheduler).__name__)
        except ValueError as error:
            raise HookError(f"{error} ({place_of(self._scheduler, 'rebalance')})") from error
        number = {self._requests[place].id: place for left in self._left for place in left}
        goals = {number[move.request_id]: move.worker for move in moves}
        goals = {place: worker for place, worker in goals.items() if worker != self._worker[place]}
        for place, worker in goals.items():
            self._left[worker][place] = self._left[self._worker[place]].pop(place)
            self._worker[place] = worker
        self.num_moves += len(goals)
        return goals

    def _progress(self) -> Progress:
        assert self._step is not None
        return Progress(
            step=self._step,
            planned=self._planned,
            requests=[self._requests[place] for left in self._left for place in left],
            workers=np.repeat(np.arange(len(self._left)), [len(left) for left in self._left]),
            num_tokens=np.array([tokens for left in self._left for tokens in left.values()], np.int64),
        )
