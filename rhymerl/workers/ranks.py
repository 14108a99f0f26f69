"""One worker a rank: each steps the host of its rank's backend, and all keep step with the trainer."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

from torch import Tensor

from rhymerl.backends.base import RolloutBackend
from rhymerl.backends.spans import WorkerSpan
from rhymerl.distributed import Channel, Message
from rhymerl.errors import BackendError
from rhymerl.history import HistoryStore
from rhymerl.types import Completion, IntArray, Output, RolloutRequest, Sample
from rhymerl.workers.base import REBALANCE_S, Workers, follows_clock
from rhymerl.workers.coordinator import (
    Command,
    Coordinator,
    ProgressReport,
    SharedPlan,
    StepRequests,
    make_plan,
    wants_progress,
)
from rhymerl.workers.host import Host
from rhymerl.workers.run_ahead_state import RunAheadState
from rhymerl.workers.step_in_flight import StepInFlight
from rhymerl.workers.versions import Versions

_SLICE_S = 0.02  # between two exchanges with the other ranks
_PASSES = 16  # the same in lockstep


@dataclass(frozen=True, slots=True, kw_only=True)
class MovedRequest:
    """A request on its way to another rank, with its output so far; both know it by its index in the step's list."""

    index: int
    output: Output
    prefetched: IntArray | None  # the request's draft of the whole answer


class RankStep:
    """A step on this rank: what it reports of its requests, gives away, receives, and has of the next step."""

    def __init__(
        self, host: Host, this_step: StepInFlight, *, next_versions: Versions, report_every_s: float | None = None
    ) -> None:
        self._host = host
        self._this_step = this_step
        self._next_step: StepInFlight | None = None  # once it has begun ahead
        self._next_versions = next_versions
        self._report_every_s = report_every_s  # how often rank 0 hears how far the answers are, if it is to know at all
        self._finished: list[Completion] = []  # not reported yet
        self._reported_at = 0.0
        self._messages: list[Message] = []

    def go_on(self, requests: Sequence[RolloutRequest], *, next_step: StepInFlight | None = None) -> None:
        """Answer requests of the step, or of the next one."""
        step = next_step or self._this_step
        step.worker |= dict.fromkeys((request.id for request in requests), self._host.number)
        self._host.submit(requests, priority=step.work.priority, versions=step.versions)

    def take(self) -> list[Completion]:
        finished, self._host.finished = self._host.finished, []
        for each in finished:
            name = each.request.id
            step = next((step for step in (self._this_step, self._next_step) if step and name in step.worker), None)
            if step is None:
                raise BackendError(f"the answer to {name} has come, which is of no step that is under way")
            step.finish(name, each.output)
        ended = self._this_step.take()
        self._finished += ended
        return ended

    def report(self) -> ProgressReport | None:
        """Return what is new for the coordinator, or None when nothing is."""
        now, every_s = time.monotonic(), self._report_every_s
        tells_tokens = every_s is not None and bool(self._this_step.worker) and now - self._reported_at >= every_s
        if not self._finished and not tells_tokens:
            return None
        if tells_tokens:
            self._reported_at = now
        finished, self._finished = self._finished, []
        return self._this_step.report(finished, self._host.progress() if tells_tokens else {})

    def messages(self) -> list[Message]:
        messages, self._messages = self._messages, []
        return messages

    def receive(self, moved: Sequence[MovedRequest]) -> None:
        requests = [(self._this_step.work.requests[each.index], each) for each in moved]
        self.go_on([replace(one, output=each.output or None, prefetched=each.prefetched) for one, each in requests])

    def follow(self, command: Command) -> None:
        """Give away what goes on elsewhere, and take on this rank's part of the next step, behind all of this one."""
        work, index = self._this_step.work, self._this_step.index
        for each in self._taken_back(name for name in self._this_step.worker if index[name] in command.moves):
            del self._this_step.worker[each.request.id]
            number = index[each.request.id]
            moved = MovedRequest(index=number, output=each.output, prefetched=each.request.prefetched)
            self._messages.append(Message(to=command.moves[number], value=moved))
        if command.plan is not None and work.following is not None:
            self._next_step = StepInFlight(work=work.next_step(), plan=command.plan, versions=self._next_versions)
            queue = command.plan.queue(self._next_step.work.requests, worker=self._host.number)
            self.go_on(queue, next_step=self._next_step)

    def end(self) -> RunAheadState | None:
        """Return what this rank has of the next step, once all are done with this one; None without a plan for it."""
        if self._next_step is None:
            return None
        released = self._taken_back(self._next_step.worker)
        self.take()  # what has ended meanwhile
        known = {each.request.id: each.output for each in released if each.output.is_finished or len(each.output)}
        self._next_step.outputs |= known
        return self._next_step.state()

    def _taken_back(self, names: Iterable[str]) -> list[Completion]:
        self._host.withdraw(list(names))
        released, self._host.released = self._host.released, []
        return released


@dataclass(kw_only=True, eq=False, repr=False)
class RankWorkers(Workers):
    """This rank's worker over `backend`, which has been started, and the way to the others.

    Raises ValueError with `lockstep` for a backend that cannot keep step.
    """

    backend: RolloutBackend

    def __post_init__(self) -> None:
        self._episodes = self.episodes.episodes() if self.episodes is not None else None
        self._host = Host(self.backend, version=0, number=self.ranks.rank, episodes=self._episodes)
        self._prefetched: RunAheadState | None = None  # for the next step
        self._channel: Channel | None = None
        # A rank alone has nobody to keep step with, nor have those whose actions do not depend on the others'.
        self.lockstep &= self.ranks.size > 1 and follows_clock(self.scheduler, self.run_ahead)
        if self.lockstep and not self.backend.counts_passes:
            raise ValueError(
                f"lockstep=True: {type(self.backend).__name__} cannot count passes, by which {self.ranks.size} ranks keep step; expected a "
                "backend that does, or run_ahead=off with a scheduler that moves nothing"
            )

    # -- a step --------------------------------------------------------------------------------------------------

    def answer(self, work: StepRequests) -> Iterator[Completion]:
        found = self._prefetched if work.split == "train" else None
        taken = found if found is not None and found.step == work.step else None
        # It may be of before a resume with other settings.
        state = taken if taken is not None and taken.asked == work.asked else None
        plan = self._plan_of(work, state)
        step = self._begin(work, plan, state.outputs if state is not None else {})
        coordinator = self.coordinator(work, plan)
        self._channel = self.ranks.channel(lockstep=self.lockstep)
        is_done = False
        while not is_done:
            self._decode()
            yield from step.take()
            is_done = self._exchange(step, coordinator, self._channel)
        self.num_moves, self.busy_s = coordinator.num_moves, self._host.busy_s
        if work.following is not None or taken is not None:
            self._prefetched = step.end()

    def end_step(self) -> None:
        if self._channel is not None:
            self._channel.close()
        self._channel = None

    def _plan_of(self, work: StepRequests, state: RunAheadState | None) -> SharedPlan:
        """Return that by which answers have been prefetched, if it is for as many workers; else a new one of rank 0."""
        if state is not None and len(state.plan.queues) == self.ranks.size:
            return state.plan
        workers, is_first = self.ranks.size, self.ranks.rank == 0
        plan = make_plan(self.scheduler, work.requests, num_workers=workers, step=work.step) if is_first else None
        return cast(SharedPlan, self.ranks.broadcast(plan))

    def _begin(self, work: StepRequests, plan: SharedPlan, outputs: Mapping[str, Output]) -> RankStep:
        assert self._host.version is not None
        versions, next_versions = (
            Versions.of(self._host.version + ahead, self.run_ahead, self.max_staleness) for ahead in (0, 1)
        )
        in_flight = StepInFlight(work=work, plan=plan, versions=versions, outputs=dict(outputs))
        every_s = (0.0 if self.lockstep else REBALANCE_S) if wants_progress(self.scheduler) else None
        step = RankStep(self._host, in_flight, next_versions=next_versions, report_every_s=every_s)
        self._host.busy_s = 0.0
        queue = plan.queue(work.requests, worker=self.ranks.rank)
        step.go_on([in_flight.request(request.id) for request in queue])
        return step

    def _decode(self) -> None:
        if self.lockstep:
            self._host.decode(max_passes=_PASSES)
        else:
            self._host.decode(timeout_s=_SLICE_S if self.ranks.size > 1 else None)

    def _exchange(self, step: RankStep, coordinator: Coordinator, channel: Channel) -> bool:
        """Exchange reports, messages and commands with the other ranks; return whether all are done."""
        waits = not self._host.is_busy
        received = channel.exchange(step.report(), step.messages(), coordinator.decide, waits=waits)
        step.receive(received.messages)
        for command in received.commands:
            step.follow(command)
        return any(command.is_done for command in received.commands)

    # -- between steps -------------------------------------------------------------------------------------------

    def sync_weights(self, named_tensors: Iterable[tuple[str, Tensor]], policy_version: int) -> None:
        self._host.renew(policy_version, lambda: self._loaded(named_tensors, policy_version))

    def _loaded(self, named_tensors: Iterable[tuple[str, Tensor]], policy_version: int) -> RolloutBackend:
        self._host.backend.sync_weights(named_tensors, policy_version)
        return self._host.backend

    def learn(self, samples: Sequence[Sample]) -> None:
        self._host.backend.learn(samples)

    def follow(self, history: HistoryStore) -> None:
        self._host.backend.follow(history)

    def state(self) -> RunAheadState | None:
        return self._prefetched

    def restore(self, state: RunAheadState | None) -> None:
        self._prefetched = state

    def sleep(self) -> None:
        self._host.backend.sleep()

    @property
    def num_waiting(self) -> int:
        return self._host.num_waiting

    def metrics(self) -> Mapping[str, float]:
        return self._host.metrics()

    def spans(self) -> list[WorkerSpan]:
        return self._host.spans.take()

    def close(self) -> None:
        if self._episodes is not None:
            self._episodes.close()
