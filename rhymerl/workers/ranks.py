"""One worker a rank: each drives the engine of its rank, and all keep step with the trainer."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, cast

from rhymerl.backends.base import RolloutBackend
from rhymerl.backends.spans import EVALUATION, WorkerSpan
from rhymerl.distributed import Channel, Ranks
from rhymerl.history import HistoryStore
from rhymerl.schedulers.base import Scheduler
from rhymerl.types import Completion, Output, RolloutRequest, Sample
from rhymerl.workers.base import RunAhead, StepRequests, Workers, follows_clock
from rhymerl.workers.coordinator import Coordinator, SharedPlan, make_plan, wants_progress
from rhymerl.workers.run_ahead import RunAheadState, fingerprint
from rhymerl.workers.worker import DecodeLimits, Worker

if TYPE_CHECKING:
    from torch import Tensor

_SLICE_S = 0.02  # between two exchanges with the other ranks
REBALANCE_S = 0.5
_PASSES = 16  # the same in lockstep, where time is counted in exchanges
REBALANCE_EXCHANGES = 4


class RankWorkers(Workers):
    """This rank's worker over `backend`, which has been started, and the way to the others.

    With `lockstep` nothing follows the clock, so that a run over several ranks repeats bit for bit. Raises ValueError for a backend
    that cannot keep step.
    """

    def __init__(
        self,
        backend: RolloutBackend,
        scheduler: Scheduler,
        *,
        ranks: Ranks,
        run_ahead: RunAhead = "off",
        lockstep: bool = False,
    ) -> None:
        self._worker = Worker(backend, number=ranks.rank)
        self._scheduler = scheduler
        self._ranks = ranks
        self._run_ahead = run_ahead
        self._ahead: RunAheadState | None = None  # for the next step to come
        self._channel: Channel | None = None
        self._lockstep = lockstep and ranks.size > 1 and follows_clock(scheduler, run_ahead)
        if self._lockstep and not self._worker.counts_passes:
            raise ValueError(
                f"lockstep=True: {self._worker.name} cannot count passes, by which {ranks.size} ranks keep step; expected a "
                "backend that does, or run_ahead=off with a scheduler that moves nothing"
            )

    def answer(self, work: StepRequests) -> Iterator[Completion]:
        found = self._ahead if work.split == "train" else None
        taken = found if found is not None and found.step == work.step else None
        # It may be of before a resume with other settings.
        state = taken if taken is not None and taken.asked == fingerprint(work.requests) else None
        plan = self._plan_of(work, state)
        self._begin(work, plan, state.outputs if state is not None else {})
        coordinator = self._coordinator(work, plan)
        self._channel = self._ranks.channel(lockstep=self._lockstep)
        following: SharedPlan | None = None
        is_done = False
        while not is_done:
            yield from self._worker.decode()
            is_done, planned = self._exchange(work, coordinator, self._channel)
            following = planned or following
        self.num_moves, self.busy_s = coordinator.num_moves, self._worker.busy_s
        if work.following is not None or taken is not None:
            self._ahead = self._paused(work, following)

    def end_step(self) -> None:
        if self._channel is not None:
            self._channel.close()
        self._channel = None

    # -- the beginning of a step ---------------------------------------------------------------------------------

    def _plan_of(self, work: StepRequests, state: RunAheadState | None) -> SharedPlan:
        """Return that by which answers have been prefetched, if it is for as many workers; else a new one of rank 0."""
        if state is not None and len(state.plan.queues) == self._ranks.size:
            return state.plan
        workers, is_first = self._ranks.size, self._ranks.rank == 0
        plan = make_plan(self._scheduler, work.requests, num_workers=workers, step=work.step) if is_first else None
        return cast(SharedPlan, self._ranks.broadcast(plan))

    def _begin(self, work: StepRequests, plan: SharedPlan, outputs: Mapping[str, Output]) -> None:
        queue = plan.queue(work.requests, worker=self._ranks.rank)
        if self._run_ahead == "draft":
            queue = [with_draft(request, outputs.get(request.id)) for request in queue]
        outputs = outputs if self._run_ahead == "keep" else {}
        step = work.number if work.number is not None else EVALUATION
        self._worker.begin_step(queue, requests=work.requests, outputs=outputs, limits=self._limits, step=step)

    def _coordinator(self, work: StepRequests, plan: SharedPlan) -> Coordinator:
        return Coordinator(
            self._scheduler,
            work.requests,
            plan,
            step=work.number,
            following=work.following,
            keeps=self._run_ahead == "keep",
            every=REBALANCE_EXCHANGES if self._lockstep else REBALANCE_S,
            clock=None if self._lockstep else time.monotonic,
        )

    @property
    def _limits(self) -> DecodeLimits:
        reports = wants_progress(self._scheduler)
        if self._lockstep:
            return DecodeLimits(max_passes=_PASSES, report_every_s=0.0 if reports else None)
        every_s = REBALANCE_S if reports else None
        return DecodeLimits(timeout_s=_SLICE_S if self._ranks.size > 1 else None, report_every_s=every_s)

    # -- its course ----------------------------------------------------------------------------------------------

    def _exchange(
        self, work: StepRequests, coordinator: Coordinator, channel: Channel
    ) -> tuple[bool, SharedPlan | None]:
        """Tell the other ranks what is new, and follow what they say; returns whether all are done, and a plan of the next step."""
        worker = self._worker
        received = channel.exchange(worker.report(), worker.messages(), coordinator.decide, waits=not worker.is_busy)
        worker.receive(received.messages)
        planned: SharedPlan | None = None
        for command in received.commands:
            worker.give_back(command.moves)
            if command.plan is not None and work.following is not None:
                planned = command.plan
                worker.run_ahead(planned.queue(work.following, worker=self._ranks.rank))
        return any(command.is_done for command in received.commands), planned

    def _paused(self, work: StepRequests, planned: SharedPlan | None) -> RunAheadState | None:
        """Return what this rank has of the following step, once all are done with this one; None without a plan for it."""
        outputs = self._worker.pause()
        if work.following is None or planned is None:
            return None
        asked = fingerprint(work.following)
        return RunAheadState(step=int(work.step) + 1, asked=asked, plan=planned, outputs=outputs)

    # -- between steps -------------------------------------------------------------------------------------------

    def sync_weights(self, named_tensors: Iterable[tuple[str, Tensor]], policy_version: int) -> None:
        self._worker.sync_weights(named_tensors, policy_version)

    def learn(self, samples: Sequence[Sample]) -> None:
        self._worker.learn(samples)

    def follow(self, history: HistoryStore) -> None:
        self._worker.follow(history)

    def state(self) -> RunAheadState | None:
        return self._ahead

    def restore(self, state: RunAheadState | None) -> None:
        self._ahead = state

    def sleep(self) -> None:
        self._worker.sleep()

    def metrics(self) -> Mapping[str, float]:
        return self._worker.metrics()

    def spans(self) -> list[WorkerSpan]:
        return self._worker.spans.take()


def with_draft(request: RolloutRequest, output: Output | None) -> RolloutRequest:
    """Return the request with these tokens as a draft of its whole answer."""
    return replace(request, prefetched=output.token_ids) if output is not None else request
