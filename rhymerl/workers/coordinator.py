"""The coordinator of a step: it plans on rank 0, tracks every worker's requests, orders moves, and ends the step."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass

import numpy as np

from rhymerl.backends.spans import EVALUATION
from rhymerl.errors import ConfigError, HookError
from rhymerl.hooks import Hooks, line_of
from rhymerl.schedulers.base import Plan, Progress, Scheduler, check_moves, check_plan, plan_hash
from rhymerl.types import RolloutRequest, Split

_NEARLY = 0.1  # of a worker's requests


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRequests:
    """The requests that are answered together, in canonical order, and the next step's, which workers may begin."""

    step: int | str
    requests: Sequence[RolloutRequest]
    following: Sequence[RolloutRequest] | None = None
    split: Split = "train"
    episodes: str = ""  # what their turns follow from: environment and limits; empty where answers are of one turn

    @property
    def number(self) -> int | None:
        """Return the step of training; None for an evaluation, in which nothing moves."""
        return self.step if isinstance(self.step, int) and self.split == "train" else None

    @property
    def priority(self) -> int:
        """Return the priority, of which the lowest goes first: an evaluation before all steps."""
        return EVALUATION if self.number is None else self.number

    @property
    def asked(self) -> str:
        """Return 32 hex digits that say what is asked for: requests, their noise, their sampling, their turns."""
        digest = hashlib.blake2b(self.episodes.encode(), digest_size=16)
        sampling: object = None
        for request in self.requests:
            if request.sampling is not sampling:
                sampling = request.sampling
                digest.update(repr(sampling).encode())
            digest.update(f"{request.id}\0{request.seed}\0".encode())
        return digest.hexdigest()

    def next_step(self) -> StepRequests:
        """Return the requests of the next step as a step of their own."""
        assert isinstance(self.step, int) and self.following is not None
        return StepRequests(step=self.step + 1, requests=self.following, episodes=self.episodes)


def few_left(planned: int) -> int:
    """Return how many of a worker's `planned` requests are left when it counts as nearly idle."""
    return int(_NEARLY * planned)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPlan:
    """Queues as indices into the step's list of requests, which every rank has, and a hash of the requests meant."""

    queues: Sequence[Sequence[int]]
    digest: str

    def queue(self, requests: Sequence[RolloutRequest], *, worker: int) -> list[RolloutRequest]:
        """Return a worker's requests. Raises ConfigError if this rank's `requests` differ from rank 0's."""
        indices = [index for queue in self.queues for index in queue]
        if len(indices) == len(requests):
            plan: Plan = [[requests[index] for index in queue] for queue in self.queues]
            if plan_hash(plan) == self.digest:
                return list(plan[worker])
        first = requests[0].id if requests else "none"
        raise ConfigError(
            f"rank {worker} has other prompts than rank 0 in this step ({len(requests)} requests from {first!r} on, {len(indices)} "
            "planned): every rank needs the whole step's prompts, so nothing may split them by rank (a loader with a distributed "
            "sampler, data files or data.seed that differ between nodes)"
        )


def make_plan(
    scheduler: Scheduler, requests: Sequence[RolloutRequest], *, num_workers: int, step: int | str
) -> SharedPlan:
    """Ask the scheduler, on rank 0. Raises HookError, naming scheduler and request, for a plan that is no partition."""
    with Hooks("scheduler", scheduler):
        plan = scheduler.plan(requests, num_workers, step if isinstance(step, int) else 0)
    try:
        check_plan(plan, requests, num_workers=num_workers, scheduler=type(scheduler).__name__)
    except ValueError as error:
        raise HookError(f"{error} ({line_of(scheduler, 'plan')})") from error
    index = {request.id: number for number, request in enumerate(requests)}
    queues = [[index[request.id] for request in queue] for queue in plan]
    return SharedPlan(queues=queues, digest=plan_hash(plan))


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressReport:
    """A worker's progress on its requests, each by its index in the step's list."""

    finished: Sequence[int]  # since the last report
    tokens: Mapping[int, int]  # sampled so far


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A message to all workers."""

    moves: Mapping[int, int]  # index of a request -> the worker with which it goes on
    plan: SharedPlan | None = None  # of the following step
    is_done: bool = False  # everything is answered: pause


def wants_progress(scheduler: Scheduler) -> bool:
    """Return whether rank 0 needs the answers' progress."""
    return scheduler.migrates or scheduler.observes


@dataclass(eq=False)
class Coordinator:
    """Plans and moves the requests of all workers, as the scheduler decides.

    Outside of training nothing moves. In a step of it a scheduler that migrates is asked for moves from time to time,
    and right before the plan of the next step, which is made when a worker has nearly nothing left to do.
    """

    scheduler: Scheduler
    work: StepRequests
    plan: InitVar[SharedPlan]
    _: KW_ONLY
    keeps: bool  # prefetched answers stay: the scheduler observes what is unfinished before it plans the next step
    every: float  # the scheduler is asked for moves whenever `clock` has gone on by this much
    clock: Callable[[], float] | None = None  # None: the number of calls of `decide`
    works_on: bool = False  # workers go on during the update: they get the next plan even when all is answered

    def __post_init__(self, plan: SharedPlan) -> None:
        self.num_moves = 0
        self._following = self.work.following
        self._num_calls = 0
        self._now = self.clock or (lambda: self._num_calls)
        self._migrates = self.work.number is not None and self.scheduler.migrates
        self._planned = np.array([len(queue) for queue in plan.queues], np.int64)
        self._left = [dict.fromkeys(queue, 0) for queue in plan.queues]  # by worker: index -> tokens sampled
        self._worker = {index: worker for worker, queue in enumerate(plan.queues) for index in queue}
        self.asks_at = self._now() + self.every  # when the scheduler is asked for moves next, by that clock
        self._is_done = False

    def decide(self, reports: Sequence[tuple[int, ProgressReport]]) -> Command | None:
        """Return the next command, if one is needed; `reports` are (rank, report) since the last call."""
        self._num_calls += 1
        for _, report in reports:
            self._note(report)
        if self._is_done:
            return None
        if not any(self._left):
            if self._following is not None and self.works_on:
                return self._plan_following(self._following)
            self._is_done = True
            return Command(moves={}, is_done=True)
        if self._following is not None and any(map(self._is_nearly_done, range(len(self._left)))):
            return self._plan_following(self._following)
        if self._migrates and self._now() >= self.asks_at:
            moves = self._rebalance()
            return Command(moves=moves) if moves else None
        return None

    def _is_nearly_done(self, worker: int) -> bool:
        return len(self._left[worker]) <= few_left(int(self._planned[worker]))

    def _note(self, report: ProgressReport) -> None:
        for index, tokens in report.tokens.items():
            left = self._left[self._worker[index]]
            if index in left:
                left[index] = tokens
        for index in report.finished:
            self._left[self._worker[index]].pop(index, None)

    def _plan_following(self, following: Sequence[RolloutRequest]) -> Command:
        assert self.work.number is not None
        self._following = None
        moves = self._rebalance() if self._migrates else {}
        if self.keeps:
            with Hooks("scheduler", self.scheduler):
                self.scheduler.observe(self._progress())
        plan = make_plan(self.scheduler, following, num_workers=len(self._left), step=self.work.number + 1)
        return Command(moves=moves, plan=plan)

    def _rebalance(self) -> dict[int, int]:
        """Ask the scheduler for moves and note them. Raises HookError, naming it, for an impossible one."""
        self.asks_at, progress = self._now() + self.every, self._progress()
        with Hooks("scheduler", self.scheduler):
            moves = self.scheduler.rebalance(progress)
        try:
            check_moves(moves, progress, scheduler=type(self.scheduler).__name__)
        except ValueError as error:
            raise HookError(f"{error} ({line_of(self.scheduler, 'rebalance')})") from error
        number = {self.work.requests[index].id: index for left in self._left for index in left}
        goals = {number[move.request_id]: move.worker for move in moves}
        goals = {index: worker for index, worker in goals.items() if worker != self._worker[index]}
        self.note_moves(goals)
        self.num_moves += len(goals)
        return goals

    def note_moves(self, goals: Mapping[int, int]) -> None:
        """Move requests, by index, to other workers, unless they have ended."""
        for index, worker in goals.items():
            tokens = self._left[self._worker[index]].pop(index, None)
            self._worker[index] = worker
            if tokens is not None:
                self._left[worker][index] = tokens

    def _progress(self) -> Progress:
        assert self.work.number is not None
        return Progress(
            step=self.work.number,
            planned=self._planned,
            requests=[self.work.requests[index] for left in self._left for index in left],
            workers=np.repeat(np.arange(len(self._left)), [len(left) for left in self._left]),
            num_tokens=np.array([tokens for left in self._left for tokens in left.values()], np.int64),
        )
