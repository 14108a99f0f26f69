"""One worker a rank: each steps the host of its rank's engine, and all keep step with the trainer."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import cast

from torch import Tensor

from rhymerl.backends.base import RolloutBackend
from rhymerl.backends.spans import WorkerSpan
from rhymerl.distributed import Channel, Message, Ranks
from rhymerl.environments.build import EpisodeSettings
from rhymerl.errors import BackendError
from rhymerl.history import HistoryStore
from rhymerl.schedulers.base import Scheduler
from rhymerl.types import Completion, IntArray, Output, RolloutRequest, Sample
from rhymerl.workers.base import RunAhead, Workers, follows_clock
from rhymerl.workers.coordinator import (
    REBALANCE_S,
    Command,
    Coordinator,
    ProgressReport,
    SharedPlan,
    StepRequests,
    coordinator_of,
    make_plan,
    wants_progress,
)
from rhymerl.workers.host import Host
from rhymerl.workers.run_ahead import RunAheadState
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
    """A step's requests on this rank: what it reports of them, gives away, receives, and has of the next step."""

    def __init__(
        self,
        host: Host,
        work: StepRequests,
        run_ahead: RunAhead,
        *,
        max_staleness: int = 1,
        report_every_s: float | None = None,
    ) -> None:
        assert host.version is not None
        self.versions, self._next_versions = (
            Versions.of(host.version + ahead, run_ahead, max_staleness) for ahead in (0, 1)
        )
        self._host = host
        self._work = work
        self._report_every_s = report_every_s  # how often rank 0 hears how far the answers are, if it is to know at all
        self._index = {request.id: index for index, request in enumerate(work.requests)}
        self._left: dict[str, RolloutRequest] = {}  # here, and not answered
        self._finished: list[int] = []  # not reported yet
        self._reported_at = 0.0
        self._planned: SharedPlan | None = None  # of the next step
        self._next: dict[str, None] = {}  # its requests that are here, in their order
        self._ahead: dict[str, Output] = {}  # what there is of them, once they are out of the engine
        self._messages: list[Message] = []

    def go_on(self, requests: Sequence[RolloutRequest]) -> None:
        self._left |= {request.id: request for request in requests}
        self._host.submit(requests, priority=self._work.priority, versions=self.versions)

    def take(self) -> list[Completion]:
        finished, self._host.finished = self._host.finished, []
        ended = []
        for each in finished:
            name = each.request.id
            if name in self._left:
                del self._left[name]
                self._finished.append(self._index[name])
                ended.append(each)
            elif name in self._next:
                self._ahead[name] = each.output
            else:
                raise BackendError(f"the answer to {name} has come, which is of no step that is under way")
        return ended

    def report(self) -> ProgressReport | None:
        """Return what is new for the coordinator, or None when nothing is."""
        now, every_s = time.monotonic(), self._report_every_s
        tells_tokens = every_s is not None and bool(self._left) and now - self._reported_at >= every_s
        if not self._finished and not tells_tokens:
            return None
        tokens: dict[int, int] = {}
        if tells_tokens:
            self._reported_at = now
            progress = self._host.progress()
            tokens = {self._index[name]: progress[name] for name in self._left if name in progress}
        finished, self._finished = tuple(self._finished), []
        return ProgressReport(finished=finished, tokens=tokens)

    def messages(self) -> list[Message]:
        messages, self._messages = self._messages, []
        return messages

    def receive(self, moved: Sequence[MovedRequest]) -> None:
        requests = [(self._work.requests[each.index], each) for each in moved]
        self.go_on([replace(one, output=each.output or None, prefetched=each.prefetched) for one, each in requests])

    def follow(self, command: Command, *, rank: int) -> None:
        """Give away what goes on elsewhere, and take on this rank's part of the next step, behind all of this one."""
        for each in self._taken_back(name for name in self._left if self._index[name] in command.moves):
            name = each.request.id
            index, prefetched = self._index[name], self._left.pop(name).prefetched
            moved = MovedRequest(index=index, output=each.output, prefetched=prefetched)
            self._messages.append(Message(to=command.moves[index], value=moved))
        if command.plan is not None and self._work.following is not None:
            self._planned, following = command.plan, self._work.next_step()
            queue = command.plan.queue(following.requests, worker=rank)
            self._next = dict.fromkeys(request.id for request in queue)
            self._host.submit(queue, priority=following.priority, versions=self._next_versions)

    def end(self) -> RunAheadState | None:
        """Return what this rank has of the next step, once all are done with this one; None without a plan for it."""
        released = {each.request.id: each.output for each in self._taken_back(self._next)}
        self.take()  # into `_ahead`: what has ended meanwhile
        self._ahead |= released
        if self._work.following is None or self._planned is None:
            return None
        following = self._work.next_step()
        outputs = {name: output for name, output in self._ahead.items() if output.is_finished or len(output)}
        return RunAheadState(step=int(following.step), asked=following.asked, plan=self._planned, outputs=outputs)

    def _taken_back(self, names: Iterable[str]) -> list[Completion]:
        self._host.withdraw(list(names))
        released, self._host.released = self._host.released, []
        return released


@dataclass(eq=False, repr=False)
class RankWorkers(Workers):
    """This rank's worker over `backend`, which has been started, and the way to the others.

    With `lockstep` nothing follows the clock, so that a run over several ranks repeats bit for bit. Raises ValueError
    for a backend that cannot keep step.
    """

    backend: RolloutBackend
    scheduler: Scheduler
    _: KW_ONLY
    ranks: Ranks
    run_ahead: RunAhead = "off"
    max_staleness: int = 1
    lockstep: bool = False
    episodes: EpisodeSettings | None = None

    def __post_init__(self) -> None:
        self._episodes = self.episodes.episodes() if self.episodes is not None else None
        self._host = Host(self.backend, version=0, number=self.ranks.rank, episodes=self._episodes)
        self._ahead: RunAheadState | None = None  # for the next step to come
        self._channel: Channel | None = None
        self._lockstep = self.lockstep and self.ranks.size > 1 and follows_clock(self.scheduler, self.run_ahead)
        if self._lockstep and not self.backend.counts_passes:
            raise ValueError(
                f"lockstep=True: {type(self.backend).__name__} cannot count passes, by which {self.ranks.size} ranks keep step; expected a "
                "backend that does, or run_ahead=off with a scheduler that moves nothing"
            )

    # -- a step --------------------------------------------------------------------------------------------------

    def answer(self, work: StepRequests) -> Iterator[Completion]:
        found = self._ahead if work.split == "train" else None
        taken = found if found is not None and found.step == work.step else None
        # It may be of before a resume with other settings.
        state = taken if taken is not None and taken.asked == work.asked else None
        plan = self._plan_of(work, state)
        step = self._begin(work, plan, state.outputs if state is not None else {})
        keeps = self.run_ahead == "keep"
        coordinator = coordinator_of(self.scheduler, work, plan, keeps=keeps, lockstep=self._lockstep)
        self._channel = self.ranks.channel(lockstep=self._lockstep)
        is_done = False
        while not is_done:
            self._decode()
            yield from step.take()
            is_done = self._exchange(step, coordinator, self._channel)
        self.num_moves, self.busy_s = coordinator.num_moves, self._host.busy_s
        if work.following is not None or taken is not None:
            self._ahead = step.end()

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
        every_s = 0.0 if self._lockstep else REBALANCE_S
        step = RankStep(
            self._host,
            work,
            self.run_ahead,
            max_staleness=self.max_staleness,
            report_every_s=every_s if wants_progress(self.scheduler) else None,
        )
        self._host.busy_s = 0.0
        queue = plan.queue(work.requests, worker=self.ranks.rank)
        step.go_on([step.versions.going_on(request, outputs.get(request.id)) for request in queue])
        return step

    def _decode(self) -> None:
        if self._lockstep:
            self._host.decode(max_passes=_PASSES)
        else:
            self._host.decode(timeout_s=_SLICE_S if self.ranks.size > 1 else None)

    def _exchange(self, step: RankStep, coordinator: Coordinator, channel: Channel) -> bool:
        """Exchange reports, messages and commands with the other ranks; return whether all are done."""
        waits = not self._host.is_busy
        received = channel.exchange(step.report(), step.messages(), coordinator.decide, waits=waits)
        step.receive(received.messages)
        for command in received.commands:
            step.follow(command, rank=self.ranks.rank)
        return any(command.is_done for command in received.commands)

    # -- between steps -------------------------------------------------------------------------------------------

    def sync_weights(self, named_tensors: Iterable[tuple[str, Tensor]], policy_version: int) -> None:
        self._host.renew(policy_version, lambda: self._loaded(named_tensors, policy_version))

    def _loaded(self, named_tensors: Iterable[tuple[str, Tensor]], policy_version: int) -> RolloutBackend:
        self._host.engine.sync_weights(named_tensors, policy_version)
        return self._host.engine

    def learn(self, samples: Sequence[Sample]) -> None:
        self._host.engine.learn(samples)

    def follow(self, history: HistoryStore) -> None:
        self._host.engine.follow(history)

    def state(self) -> RunAheadState | None:
        return self._ahead

    def restore(self, state: RunAheadState | None) -> None:
        self._ahead = state

    def sleep(self) -> None:
        self._host.engine.sleep()

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
