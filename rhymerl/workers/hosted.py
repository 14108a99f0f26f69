"""Workers apart from the trainer's ranks: they go on with the next step while the policy is trained."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from typing import TYPE_CHECKING

from rhymerl.backends.hosted.base import HostedBackend
from rhymerl.backends.hosted.messages import Events, Learn, Measure, Message, Weights, Withdraw
from rhymerl.distributed import Ranks
from rhymerl.errors import BackendError, RhymeError
from rhymerl.history import HistoryStore
from rhymerl.schedulers.base import Scheduler
from rhymerl.types import Completion, Output, Sample
from rhymerl.workers.base import RunAhead, StepRequests, Workers
from rhymerl.workers.coordinator import Coordinator, SharedPlan, make_plan, wants_progress
from rhymerl.workers.in_flight import InFlight, Versions
from rhymerl.workers.member import Member
from rhymerl.workers.metrics import over_workers
from rhymerl.workers.run_ahead import RunAheadState, fingerprint

if TYPE_CHECKING:
    from torch import Tensor

LOG = logging.getLogger(__name__)
_POLL_S = 0.1  # a worker keeps what is not urgent for so long
_SLICE_S = 0.05  # between two looks of the coordinator
_REBALANCE_S = 0.5
_PASSES = 16  # the same in lockstep, where time is counted in exchanges
_REBALANCE_EXCHANGES = 4
_MEASURE_S = 10.0  # a worker may take as long to tell of its engine
_CLOSE_S = 10.0
_LOSSES = 5  # of one worker in a row that had requests and told of no token


class HostedWorkers(Workers):
    """`num_workers` workers of a backend that has been started. Rank 0 alone speaks with them; the other ranks get no answers to score.

    A worker that is lost costs the tokens that it had not told of: its requests go on elsewhere, and another one takes its
    place. Tokens follow from the noise of a request and from the weights, so they are the same wherever it goes on.

    With `lockstep` workers do so many passes between two exchanges, and half as many as a step took while the policy is trained, so that a run
    repeats bit for bit; a worker that is lost then ends it. Raises ValueError for a backend that cannot keep step.
    """

    def __init__(
        self,
        backend: HostedBackend,
        scheduler: Scheduler,
        *,
        num_workers: int,
        ranks: Ranks,
        run_ahead: RunAhead = "off",
        max_staleness: int = 1,
        lockstep: bool = False,
    ) -> None:
        if lockstep and not backend.counts_passes:
            raise ValueError(
                f"lockstep=True: {type(backend).__name__} cannot count passes, by which its workers keep step; expected embedded engines"
            )
        self.num_lost = 0  # workers
        self.busy: list[
            tuple[int, float, float, int]
        ] = []  # worker, from .. to (Unix time), step; since the last `metrics`
        self._backend = backend
        self._scheduler = scheduler
        self._ranks = ranks
        self._run_ahead = run_ahead
        self._max_staleness = max_staleness
        self._history: HistoryStore | None = None
        self._weights: Weights | None = None
        self._resumed: RunAheadState | None = None
        self._pending: list[InFlight] = []  # the oldest first; the last may be of the step to come
        self._ahead: InFlight | None = None
        self._error: Exception | None = None
        self._ended_at = time.monotonic()  # the latest `answer`
        self._members: list[Member] = []
        self._losses = [0] * num_workers
        self._busy_frac = 0.0
        self._listener: threading.Thread | None = None
        self._lockstep = lockstep
        self._num_exchanges = 0  # of the latest `answer`
        self._changed = threading.Condition(threading.RLock())
        self._is_closed = False
        if ranks.rank == 0:
            backend.reserve(num_workers)
            self._members = [self._member(number) for number in range(num_workers)]
            if not lockstep:
                self._listener = threading.Thread(target=self._listen, name="hosted workers", daemon=True)
                self._listener.start()

    def _member(self, number: int) -> Member:
        return Member(number=number, connection=self._backend.connect(number, lockstep=self._lockstep))

    # -- a step --------------------------------------------------------------------------------------------------

    def answer(self, work: StepRequests) -> Iterator[Completion]:
        if self._ranks.rank != 0:
            return
        started = time.monotonic()
        with self._changed:
            self._settle()
            pending = self._begin(work)
        reports = wants_progress(self._scheduler)
        coordinator = self._coordinator(pending)
        is_done, self._num_exchanges = False, 0
        while not is_done:
            with self._changed:
                self._listen_a_while(pending)
                completed = pending.take()
                moved, pending.moved = pending.moved, {}
                report = pending.report(completed, tells_tokens=reports)
            yield from completed
            coordinator.note_moves(moved)
            command = coordinator.decide([(0, report)])
            if command is None:
                continue
            with self._changed:
                self._move(pending, command.moves)
                if command.plan is not None and work.following is not None:
                    self._ahead = self._launch(_following(work), command.plan, ahead=1)
            is_done = command.is_done
        with self._changed:
            self._pending.remove(pending)
            self._go_on_ahead()
        self.num_moves = coordinator.num_moves
        self._account(started)

    def _begin(self, work: StepRequests) -> InFlight:
        """Return the step, which may have begun already: while the one before was trained, or before the run was resumed."""
        ahead = self._ahead
        if work.number is None or ahead is None:
            state = self._resumed if self._resumed is not None and self._resumed.step == work.number else None
            self._resumed = None if state is not None else self._resumed
            return self._launch(work, *self._of_state(state, work))
        self._ahead = None
        if ahead.work.step == work.step and fingerprint(ahead.work.requests) == fingerprint(work.requests):
            ahead.work = work
            return ahead
        self._abandon(ahead)
        return self._launch(work, self._plan(work))

    def _of_state(self, state: RunAheadState | None, work: StepRequests) -> tuple[SharedPlan, Mapping[str, Output]]:
        if state is None or state.asked != fingerprint(work.requests):
            return self._plan(work), {}
        plan = state.plan if len(state.plan.queues) == len(self._members) else self._plan(work)
        return plan, state.outputs

    def _plan(self, work: StepRequests) -> SharedPlan:
        return make_plan(self._scheduler, work.requests, num_workers=len(self._members), step=work.step)

    def _launch(
        self, work: StepRequests, plan: SharedPlan, outputs: Mapping[str, Output] | None = None, *, ahead: int = 0
    ) -> InFlight:
        """Give each worker its queue, without answers that are there already."""
        mode = self._run_ahead if work.number is not None else "off"
        versions = Versions.of(self._version + ahead, mode, self._max_staleness)
        pending = InFlight(work=work, plan=plan, versions=versions, outputs=dict(outputs or {}))
        self._pending.append(pending)
        for member, queue in zip(self._members, plan.queues, strict=True):
            names = [work.requests[index].id for index in queue]
            pending.worker |= dict.fromkeys(names, member.number)
            for name in names:
                output = pending.outputs.get(name)
                if output is not None and output.is_finished and pending.is_final(output):
                    pending.finish(name, output)
            self._submit(member, pending, [name for name in names if name in pending.worker])
        return pending

    def _coordinator(self, pending: InFlight) -> Coordinator:
        work = pending.work
        return Coordinator(
            self._scheduler,
            work.requests,
            pending.plan,
            step=work.number,
            following=work.following,
            keeps=self._run_ahead == "keep",
            every=_REBALANCE_EXCHANGES if self._lockstep else _REBALANCE_S,
            clock=None if self._lockstep else time.monotonic,
        )

    def _move(self, pending: InFlight, moves: Mapping[int, int]) -> None:
        """Take requests back from their workers; `_take_released` gives them to the others."""
        by_worker: dict[int, list[str]] = {}
        for index, goal in moves.items():
            name = pending.work.requests[index].id
            if (now := pending.worker.get(name)) is not None and now != goal:
                by_worker.setdefault(now, []).append(name)
                pending.goals[name] = goal
        for worker, names in by_worker.items():
            self._post(self._members[worker], Withdraw(ids=names))

    def _abandon(self, pending: InFlight) -> None:
        """Nobody wants its answers any more."""
        self._pending.remove(pending)
        for member in self._members:
            names = [name for name, worker in pending.worker.items() if worker == member.number]
            if names:
                self._post(member, Withdraw(ids=names))

    def _submit(self, member: Member, pending: InFlight, names: Sequence[str]) -> None:
        """Give a worker requests, with the past answers to their prompts."""
        if not names:
            return
        message = pending.submit(names)
        if self._history is not None and (unknown := member.remind(self._history, message.requests)) is not None:
            self._post(member, unknown)
        self._post(member, message)

    def _post(self, member: Member, message: Message) -> None:
        member.connection.post(message)

    def _account(self, started: float) -> None:
        """Note how busy workers were since the step before had its answers."""
        now = time.monotonic()
        with self._changed:
            busy_s = sum(member.busy_s for member in self._members)
            for member in self._members:
                member.busy_s = 0.0
        self.sampled_s = now - self._ended_at
        self._busy_frac = min(busy_s / max(len(self._members) * (now - self._ended_at), 1e-9), 1.0)
        self.busy_s = self._busy_frac * (now - started) * self._ranks.size
        self._ended_at = now

    # -- what workers tell -----------------------------------------------------------------------------------------

    def _listen(self) -> None:
        """Take what workers tell, whatever the trainer does, until the fleet is closed."""
        while not self._is_closed:
            asked = {member.ask(_POLL_S): member for member in self._members}
            done, _ = wait(asked, timeout=_POLL_S, return_when=FIRST_COMPLETED)
            with self._changed:
                try:
                    for future in done:
                        self._take(asked[future])
                    self._look_after()
                except Exception as error:  # noqa: BLE001 - `answer` raises it
                    self._error = error
                self._changed.notify_all()
                if self._error is not None:
                    return

    def _listen_a_while(self, pending: InFlight) -> None:
        """Wait until something is new in a step, but not for long."""
        if self._lockstep:
            self._step(_PASSES)
        else:
            self._changed.wait_for(lambda: pending.finished or pending.moved or self._error, _SLICE_S)
        self._raise()

    def _step(self, max_passes: int, *, waits: bool = True) -> None:
        """Let all workers in lockstep go on."""
        self._num_exchanges += 1
        for member in self._members:
            member.asked = member.connection.step(max_passes)
        if waits:
            self._settle()

    def _settle(self) -> None:
        """Take what workers in lockstep have to tell, in the order of their numbers."""
        for member in self._members if self._lockstep else ():
            if member.asked is not None:
                self._take(member)

    def _go_on_ahead(self) -> None:
        """Let workers in lockstep go on with the next step, while nobody listens."""
        if self._lockstep and self._ahead is not None:
            self._step(max(self._num_exchanges // 2, 1) * _PASSES, waits=False)

    def _take(self, member: Member) -> None:
        """Take what a worker has told; one that is gone is replaced."""
        assert member.asked is not None
        future, member.asked = member.asked, None
        try:
            events = future.result()
        except OSError as error:
            self._replace(member, str(error) or type(error).__name__)
            return
        if events.error is not None:
            raise _of_worker(events.error, member.number)
        was_up = member.is_up
        member.note(events)
        if events.finished or events.tails:
            self._losses[member.number] = 0
        self.busy += [(member.number, *each) for each in events.busy]
        for name, output in events.finished:
            if (pending := self._owned(name, member)) is not None:
                pending.finish(name, output)
        for tail in events.tails:
            if (pending := self._owned(tail.id, member)) is not None:
                pending.tell(tail)
        self._take_released(events, member)
        if member.is_up and not was_up:
            self._even_out(member)

    def _owned(self, name: str, member: Member) -> InFlight | None:
        """Return the step in which this worker has this request."""
        return next((each for each in self._pending if each.worker.get(name) == member.number), None)

    def _take_released(self, events: Events, member: Member) -> None:
        """Requests that were withdrawn go on with the workers that they were moved to."""
        by_goal: dict[tuple[int, int], list[str]] = {}
        for name, output in events.released:
            if (pending := self._owned(name, member)) is None:
                continue
            goal = pending.goals.pop(name, member.number)
            pending.worker[name] = goal
            if len(output):
                pending.outputs[name] = output
            by_goal.setdefault((goal, self._pending.index(pending)), []).append(name)
        for (goal, number), names in by_goal.items():
            self._submit(self._members[goal], self._pending[number], names)

    # -- workers that are lost ---------------------------------------------------------------------------------------

    def _look_after(self) -> None:
        """Replace workers that hang; raise BackendError for one that does not come up."""
        now = time.monotonic()
        for member in self._members:
            if member.is_up and member.asked is not None and now - member.asked_at > self._backend.hang_timeout_s:
                self._replace(member, f"no answer for {now - member.asked_at:.0f} s")
            elif not member.is_up and self._weights is not None and now - member.since > self._backend.start_timeout_s:
                raise BackendError(
                    f"worker {member.number} has not come up within backend.start_timeout_s={self._backend.start_timeout_s:g}"
                )

    def _replace(self, member: Member, reason: str) -> None:
        """Let others go on with what a worker had, and start another in its place."""
        if self._lockstep:
            raise BackendError(f"worker {member.number} is lost ({reason}), and others cannot go on for it in lockstep")
        self.num_lost += 1
        self._losses[member.number] += any(member.number in each.worker.values() for each in self._pending)
        if self._losses[member.number] > _LOSSES:
            raise BackendError(
                f"worker {member.number} was lost {_LOSSES + 1} times before it told of a token: {reason}"
            )
        LOG.warning("worker %d is lost (%s): its requests go on elsewhere", member.number, reason)
        member.connection.kill()
        fresh = self._members[member.number] = self._member(member.number)
        if self._weights is not None:
            self._post(fresh, self._weights)
        for pending in self._pending:
            names = [name for name, worker in pending.worker.items() if worker == member.number]
            self._deal(pending, names)

    def _deal(self, pending: InFlight, names: Sequence[str]) -> None:
        """Give requests to workers that are up, the least busy ones first; to all where none is."""
        load = {member.number: 0 for member in self._members if member.is_up} or dict.fromkeys(
            range(len(self._members)), 0
        )
        for each in self._pending:
            for worker in each.worker.values():
                if worker in load:
                    load[worker] += 1
        shares: dict[int, list[str]] = {}
        for name in names:
            goal = min(load, key=lambda worker: load[worker])
            load[goal] += 1
            shares.setdefault(goal, []).append(name)
            pending.goals.pop(name, None)
            pending.worker[name] = goal
            pending.moved[pending.index[name]] = goal
        for worker, share in shares.items():
            self._submit(self._members[worker], pending, share)

    def _even_out(self, member: Member) -> None:
        """Give a worker that has come up late half of what the busiest one has, the last of its queue."""
        for pending in self._pending:
            by_worker: dict[int, list[str]] = {}
            for name, worker in pending.worker.items():
                by_worker.setdefault(worker, []).append(name)
            if by_worker.get(member.number) or not by_worker:
                continue
            busiest = max(by_worker, key=lambda worker: len(by_worker[worker]))
            names = by_worker[busiest][(len(by_worker[busiest]) + 1) // 2 :]
            moves = {pending.index[name]: member.number for name in names}
            self._move(pending, moves)
            pending.moved |= moves

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    # -- between steps -------------------------------------------------------------------------------------------

    @property
    def _version(self) -> int:
        return self._weights.version if self._weights is not None else 0

    def sync_weights(self, named_tensors: Iterable[tuple[str, Tensor]], policy_version: int) -> None:
        """Publish them; each worker loads them when it comes to it, and nobody waits. A version that is out already stays."""
        if self._ranks.rank != 0 or (self._weights is not None and self._weights.version == policy_version):
            return
        weights = Weights(version=policy_version, source=self._backend.publish(named_tensors))
        with self._changed:
            self._settle()
            self._weights = weights
            for member in self._members:
                self._post(member, weights)

    def learn(self, samples: Sequence[Sample]) -> None:
        if self._backend.learns:
            with self._changed:
                self._settle()
                for member in self._members:
                    self._post(member, Learn(samples=samples))

    def follow(self, history: HistoryStore) -> None:
        """Workers get a prompt's past answers with the prompt."""
        self._history = history if self._backend.remembers else None

    def metrics(self) -> Mapping[str, float]:
        if self._ranks.rank != 0:
            return {}
        with self._changed:
            self._settle()
            asked = [member for member in self._members if member.is_up]
            for member in asked:
                member.measured.clear()
                self._post(member, Measure())
            if self._lockstep:
                self._step(0)
            else:
                self._changed.wait_for(
                    lambda: self._error or all(each.measured or not each.is_up for each in asked), _MEASURE_S
                )
            self._raise()
            found = [member.measured.popleft() for member in asked if member.measured]
            self.busy = []
            return {
                **over_workers(found, [1.0] * len(found)),
                "workers/idle_frac": 1 - self._busy_frac,
                "workers/lost": self.num_lost,
                "workers/history_bytes": max((member.history_bytes for member in self._members), default=0),
            }

    def state(self) -> RunAheadState | None:
        with self._changed:
            self._settle()
            return self._ahead.state() if self._ahead is not None else None

    def restore(self, state: RunAheadState | None) -> None:
        self._resumed = state

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
        if self._listener is not None:
            self._listener.join(_CLOSE_S)


def _following(work: StepRequests) -> StepRequests:
    assert isinstance(work.step, int) and work.following is not None
    return StepRequests(step=work.step + 1, requests=work.following)


def _of_worker(error: Exception, number: int) -> Exception:
    """Return an error of a worker's engine as the run's."""
    return error if isinstance(error, RhymeError) else BackendError(f"worker {number}: {error!r}")
