"""The interface of schedulers, which decide which worker answers which request, and in which order."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rhymerl.types import IndexArray, RolloutRequest, Sample

Plan = list[list[RolloutRequest]]  # a queue a worker


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The unfinished part of a step, gathered from all workers: U requests over W workers."""

    step: int
    planned: IndexArray  # [W] requests that were planned for each worker
    requests: Sequence[RolloutRequest]  # [U] the unfinished ones, by worker and then in the order of its queue
    workers: IndexArray  # [U] who has each of them now
    num_tokens: IndexArray  # [U] sampled so far; 0 while a request waits


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """Go on with a request, with the tokens that it has, on another worker."""

    request_id: str
    worker: int  # where to


class Scheduler(ABC):
    """Subclass this and write `plan`; every other hook is an optional no-op. All of them run on rank 0."""

    # Requests that a worker decodes side by side: the scheduler's own setting, or else what the run's backend says.
    max_running: int | None = None
    _was_told = False  # the backend has set `max_running`
    # Whether nothing may follow the clock, since the run is to repeat bit for bit. All episodes then wait together.
    lockstep = False

    @abstractmethod
    def plan(self, requests: Sequence[RolloutRequest], num_workers: int, step: int) -> list[list[RolloutRequest]]:
        """Return one queue a worker: a partition of `requests`, each queue in the order of submission.

        The plan follows from the arguments and from what the other hooks were told, and from nothing else. Called once
        a step; for an evaluation too, with step 0.
        """

    def work_for(self, max_running: int | None) -> None:
        """Plan for workers with up to `max_running` running requests; called before the first plan."""
        if self._was_told or self.max_running is None:
            self.max_running, self._was_told = max_running, True

    def rebalance(self, progress: Progress) -> list[Move]:
        """Return the requests to move now, within their step. Called from time to time while a step is under way."""
        return []

    def observe(self, progress: Progress) -> None:
        """Note what is unfinished of the step before, which says when each worker becomes free.

        This is called just before the next step's `plan` with `run_ahead=keep`; otherwise all workers begin a step
        together.
        """

    @property
    def migrates(self) -> bool:
        """Return whether `rebalance` may move anything; ranks of a run that repeats bit for bit then keep step."""
        return type(self).rebalance is not Scheduler.rebalance

    @property
    def observes(self) -> bool:
        """Return whether `observe` does anything; rank 0 is then told how far the answers are."""
        return type(self).observe is not Scheduler.observe

    def learn(self, samples: Sequence[Sample]) -> None:
        """The finished answers of a training step, of all workers, in canonical (prompt, sample) order."""

    def metrics(self) -> dict[str, float]:
        """Return the metrics since the last call, by name. Called once a training step, after `learn`."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs, as plain containers."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what `state_dict` returned."""


def check_plan(
    plan: Sequence[Sequence[RolloutRequest]], requests: Sequence[RolloutRequest], *, num_workers: int, scheduler: str
) -> None:
    """Raise ValueError when `plan` drops, doubles or invents a request or has the wrong number of queues."""
    if not _is_list(plan) or not all(map(_is_list, plan)):
        raise ValueError(
            f"{scheduler}.plan returned {plan!r:.80}: expected a list with a list of requests for each worker"
        )
    given: list[object] = [each for queue in plan for each in queue]
    strange = [each for each in given if not isinstance(each, RolloutRequest)]
    if strange:
        raise ValueError(
            f"{scheduler}.plan returned a queue with {strange[0]!r:.80} in it: expected the requests it was given"
        )
    if len(plan) != num_workers:
        raise ValueError(f"{scheduler}.plan returned {len(plan)} queues for {num_workers} workers")
    planned = Counter(request.id for queue in plan for request in queue)
    asked = {request.id for request in requests}
    for wrong, names in (
        ("doubles", {name for name, count in planned.items() if count > 1}),
        ("invents", planned.keys() - asked),
        ("drops", asked - planned.keys()),
    ):
        if names:
            raise ValueError(f"{scheduler}.plan {wrong} the request {min(names)!r} ({len(names)} such)")


def check_moves(moves: Sequence[Move], progress: Progress, *, scheduler: str) -> None:
    """Raise ValueError for a move of a request that is not under way, a second one of it, or one to nowhere."""
    if not _is_list(moves) or not all(isinstance(move, Move) for move in moves):
        raise ValueError(f"{scheduler}.rebalance returned {moves!r:.80}: expected a list of Move")
    known = {request.id for request in progress.requests}
    moved: set[str] = set()
    for move in moves:
        if move.request_id not in known:
            raise ValueError(f"{scheduler}.rebalance moves the request {move.request_id!r}, which is not under way")
        if move.request_id in moved:
            raise ValueError(f"{scheduler}.rebalance moves the request {move.request_id!r} twice")
        if not 0 <= move.worker < len(progress.planned):
            raise ValueError(
                f"{scheduler}.rebalance moves the request {move.request_id!r} to worker {move.worker}: expected 0 to "
                f"{len(progress.planned) - 1}"
            )
        moved.add(move.request_id)


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def plan_hash(plan: Sequence[Sequence[RolloutRequest]]) -> str:
    """Return 32 hex digits of where each request stands; ranks compare them before they submit their queues."""
    digest = hashlib.blake2b(digest_size=16)
    for queue in plan:
        digest.update(f"{len(queue)}\n".encode())
        for request in queue:
            digest.update(f"{len(request.id)}:{request.id}\n".encode())
    return digest.hexdigest()
