"""The pool of workers apart from the trainer: messages to them, their events, and replacements of lost ones."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass

from rhymerl.errors import BackendError, RhymeError
from rhymerl.history import HistoryStore
from rhymerl.history.packing import PackedPrompt
from rhymerl.types import Split
from rhymerl.workers.base import Workers
from rhymerl.workers.messages import Events, HostMessage, Weights, Withdraw
from rhymerl.workers.remote.base import HostedBackend
from rhymerl.workers.remote.handle import WorkerHandle
from rhymerl.workers.step_in_flight import StepInFlight

LOG = logging.getLogger(__name__)
_POLL_S = 0.1  # a worker keeps what is not urgent for so long
_POLL_EACH_S = 1e-3  # and for longer where there are many
_CLOSE_S = 10.0
_LOSSES = 5  # of one worker in a row that had requests and told of no token


@dataclass(kw_only=True, eq=False, repr=False)
class WorkerPool(Workers):
    """`num_workers` workers of a backend that has been started, and the steps that they have requests of.

    `HostedWorkers` says what a step asks of them. Without `lockstep` a thread listens to the workers, whatever the
    trainer does; methods are called while `changed`, its lock, is held. In lockstep workers report only in `step`.
    """

    backend: HostedBackend
    num_workers: int

    def __post_init__(self) -> None:
        self.num_lost = 0
        self.changed = threading.Condition(threading.RLock())
        self.steps_in_flight: list[StepInFlight] = []  # the oldest first
        self.history: HistoryStore | None = None  # for drafters that want it
        self.weights: Weights | None = None
        self._error: Exception | None = None
        self._losses = [0] * self.num_workers
        # The newest answers, and of which split and version of the history they are.
        self._newest_answers: tuple[tuple[Split, int] | None, Sequence[PackedPrompt]] = (None, ())
        self._poll_s = max(_POLL_S, _POLL_EACH_S * self.num_workers)
        self._is_closed = False
        self._listener: threading.Thread | None = None
        if self.num_workers:
            self.backend.reserve(self.num_workers)
        least = self.backend.least_workers(self.num_workers)
        self.handles = [self._handle(number, is_late=number >= least) for number in range(self.num_workers)]
        if self.num_workers and not self.lockstep:
            self._listener = threading.Thread(target=self._listen, name="worker pool", daemon=True)
            self._listener.start()

    def _handle(self, number: int, *, is_late: bool = False) -> WorkerHandle:
        connection = self.backend.connect(number, lockstep=self.lockstep)
        if self.episodes is not None:
            connection.post(self.episodes)
        return WorkerHandle(number=number, connection=connection, is_late=is_late)

    def close(self) -> None:
        """Listen no more; may be called twice."""
        self._is_closed = True
        if self._listener is not None:
            self._listener.join(_CLOSE_S)

    # -- what workers are sent -------------------------------------------------------------------------------------

    def post(self, message: HostMessage) -> None:
        """Send a message to all workers; what one that is not here yet misses it does not need."""
        for handle in self.handles:
            if handle.is_here or not handle.is_late:
                handle.connection.post(message)

    def publish(self, weights: Weights) -> None:
        """Send new weights to all workers, and to those that will take the place of others."""
        self.weights = weights
        self.post(weights)

    def launch(self, step: StepInFlight) -> None:
        """Give each worker its queue of a step, without answered requests; others take a missing worker's queue."""
        self.steps_in_flight.append(step)
        requests = step.work.requests
        for handle, queue in zip(self.handles, step.plan.queues, strict=True):
            names = [requests[index].id for index in queue]
            step.worker |= dict.fromkeys(names, handle.number)
            for name in names:
                output = step.outputs.get(name)
                if output is not None and output.is_finished and step.versions.is_final(output):
                    step.finish(name, output)
            left = [name for name in names if name in step.worker]
            self._hand(handle, step, left)

    def move(self, step: StepInFlight, moves: Mapping[int, int]) -> None:
        """Take requests back for `_take_released` to give to other workers; those for a missing worker stay."""
        by_worker: dict[int, list[str]] = {}
        for index, goal in moves.items():
            name = step.work.requests[index].id
            if (now := step.worker.get(name)) is None or now == goal:
                continue
            if self.handles[goal].is_missing:
                step.moved[index] = now
                continue
            by_worker.setdefault(now, []).append(name)
            step.goals[name] = goal
        for worker, names in by_worker.items():
            self.handles[worker].connection.post(Withdraw(ids=names))

    def abandon(self, step: StepInFlight) -> None:
        """Nobody wants its answers any more."""
        self.steps_in_flight.remove(step)
        for handle in self.handles:
            names = [name for name, worker in step.worker.items() if worker == handle.number]
            if names:
                handle.connection.post(Withdraw(ids=names))

    def _hand(self, handle: WorkerHandle, step: StepInFlight, names: Sequence[str]) -> None:
        """Give a worker requests, or others where it is missing."""
        if handle.is_missing:
            self._deal(step, names)
        else:
            self._submit(handle, step, names)

    def _submit(self, handle: WorkerHandle, step: StepInFlight, names: Sequence[str]) -> None:
        """Give a worker requests, with the past answers to their prompts."""
        if not names:
            return
        message = step.submit(names)
        if self.history is not None:
            newest = self._newest(self.history, message.requests[0].split)
            if (unknown := handle.update_for(self.history, message.requests, newest=newest)) is not None:
                handle.connection.post(unknown)
        handle.connection.post(message)

    def _newest(self, history: HistoryStore, split: Split) -> Sequence[PackedPrompt]:
        """Return the newest answers to all prompts, found once for all workers."""
        of = split, history.version
        if self._newest_answers[0] != of:
            self._newest_answers = of, history.newest(split)
        return self._newest_answers[1]

    # -- what workers report -----------------------------------------------------------------------------------------

    def _listen(self) -> None:
        """Take what workers report, whatever the trainer does, until the pool is closed."""
        while not self._is_closed:
            asked = {handle.ask(self._poll_s if handle.is_here else 0.0): handle for handle in self.handles}
            done, _ = wait(asked, timeout=_POLL_S, return_when=FIRST_COMPLETED)
            with self.changed:
                try:
                    for future in done:
                        self._take(asked[future])
                    self._look_after()
                except Exception as error:  # noqa: BLE001 - `wait` raises it
                    self._error = error
                self.changed.notify_all()
                if self._error is not None:
                    return

    def wait(self, timeout_s: float | None, for_what: Callable[[], object]) -> None:
        """Release the lock until the condition holds, or for so long. Raises what has ended a worker, or listening."""
        self.changed.wait_for(lambda: self._error or for_what(), timeout_s)
        if self._error is not None:
            raise self._error

    def step(self, ticks: int, *, waits: bool = True, only_evaluates: bool = False) -> None:
        """Let all workers in lockstep go on for so many ticks."""
        for handle in self.handles:
            handle.asked = handle.connection.step(ticks, only_evaluates=only_evaluates)
        if waits:
            self.take_events()

    def take_events(self) -> None:
        """Take the events that workers in lockstep have been asked for, in the order of their numbers.

        First all of them have stopped: what one tells may move requests of another, which is not to hear of it before
        its next exchange.
        """
        asked = [(handle, handle.asked) for handle in self.handles if self.lockstep and handle.asked is not None]
        for handle, told in asked:
            self._wait_for(handle, told)
        for handle, _ in asked:
            self._take(handle)

    def _wait_for(self, handle: WorkerHandle, asked: Future[Events]) -> None:
        """Wait for a worker in lockstep, however long its passes take. Raises BackendError if it never answers."""
        limit_s = self.backend.hang_timeout_s if handle.is_here else self.backend.start_timeout_s
        while not wait([asked], limit_s).done:
            if handle.connection.is_alive(self.backend.hang_timeout_s):
                continue
            if not handle.is_here:
                raise self._absent(handle)
            self._replace(handle, f"no answer for {limit_s:.0f} s")  # raises, as for all that are lost in lockstep

    def _take(self, handle: WorkerHandle) -> None:
        """Take a worker's events; replace a worker that is gone."""
        assert handle.asked is not None
        future, handle.asked = handle.asked, None
        try:
            events = future.result()
        except OSError as error:
            self._replace(handle, str(error) or type(error).__name__)
            return
        if events.error is not None:
            is_known = isinstance(events.error, RhymeError)
            raise events.error if is_known else BackendError(f"worker {handle.number}: {events.error!r}")
        was_here, was_up = handle.is_here, handle.is_up
        handle.note(events)
        if handle.is_late and not was_here and self.weights is not None:
            handle.connection.post(self.weights)
        if events.finished or events.deltas:
            self._losses[handle.number] = 0
        for name, output in events.finished:
            if (step := self._owned(name, handle)) is not None:
                step.finish(name, output)
        for delta in events.deltas:
            if (step := self._owned(delta.id, handle)) is not None:
                step.extend(delta)
        self._take_released(events, handle)
        if handle.is_up and not was_up:
            self._even_out(handle)

    def _owned(self, name: str, handle: WorkerHandle) -> StepInFlight | None:
        """Return the step in which this worker has this request."""
        return next((each for each in self.steps_in_flight if each.worker.get(name) == handle.number), None)

    def _take_released(self, events: Events, handle: WorkerHandle) -> None:
        by_goal: dict[tuple[int, int], list[str]] = {}
        for name, output in events.released:
            if (step := self._owned(name, handle)) is None:
                continue
            goal = step.goals.pop(name, handle.number)
            step.worker[name] = goal
            if len(output):
                step.outputs[name] = output
            by_goal.setdefault((goal, self.steps_in_flight.index(step)), []).append(name)
        for (goal, number), names in by_goal.items():
            self._hand(self.handles[goal], self.steps_in_flight[number], names)

    # -- workers that are lost ---------------------------------------------------------------------------------------

    def _look_after(self) -> None:
        """Replace workers that hang; raise BackendError where one does not come up that the run cannot do without."""
        now = time.monotonic()
        for handle in self.handles:
            is_silent = handle.asked is not None and not handle.asked.done()
            if handle.is_here and is_silent and now - handle.asked_at > self.backend.hang_timeout_s:
                self._replace(handle, f"no answer for {now - handle.asked_at:.0f} s")
            elif not handle.is_up and self.weights is not None and now - handle.since > self.backend.start_timeout_s:
                self._miss(handle)

    def _miss(self, handle: WorkerHandle) -> None:
        if not self.backend.goes_on_short or not any(each.is_up for each in self.handles):
            raise self._absent(handle)
        if not handle.is_late:
            self._replace(handle, self._too_late)

    @property
    def _too_late(self) -> str:
        return f"has not come up within backend.start_timeout_s={self.backend.start_timeout_s:g}"

    def _absent(self, handle: WorkerHandle) -> BackendError:
        why = self.backend.why_absent()
        return BackendError(f"worker {handle.number} {self._too_late}" + (f": {why}" if why else ""))

    def _replace(self, handle: WorkerHandle, reason: str) -> None:
        """Give a lost worker's requests to others, and start another worker in its place."""
        if self.lockstep:
            raise BackendError(f"worker {handle.number} is lost ({reason}), and others cannot go on for it in lockstep")
        self.num_lost += 1
        self._losses[handle.number] += any(handle.number in each.worker.values() for each in self.steps_in_flight)
        if self._losses[handle.number] > _LOSSES:
            raise BackendError(
                f"worker {handle.number} was lost {_LOSSES + 1} times before it told of a token: {reason}"
            )
        LOG.warning("worker %d is lost (%s): its requests go on elsewhere", handle.number, reason)
        handle.connection.kill()
        self.handles[handle.number] = self._handle(handle.number, is_late=True)
        for step in self.steps_in_flight:
            names = [name for name, worker in step.worker.items() if worker == handle.number]
            self._deal(step, names)

    def _deal(self, step: StepInFlight, names: Sequence[str]) -> None:
        """Give requests to the least busy workers that are up; if none is, to those that were there from the start."""
        goals = [handle for handle in self.handles if handle.is_up]
        goals = goals or [handle for handle in self.handles if not handle.is_late] or self.handles
        load = Counter(worker for each in self.steps_in_flight for worker in each.worker.values())
        shares: dict[int, list[str]] = {}
        for name in names:
            goal = min((handle.number for handle in goals), key=lambda worker: load[worker])
            load[goal] += 1
            shares.setdefault(goal, []).append(name)
            step.goals.pop(name, None)
            step.worker[name] = goal
            step.moved[step.index[name]] = goal
        for worker, share in shares.items():
            self._submit(self.handles[worker], step, share)

    def _even_out(self, handle: WorkerHandle) -> None:
        """Give a late worker half of the busiest one's requests, the last of its queue."""
        for step in self.steps_in_flight:
            by_worker: dict[int, list[str]] = {}
            for name, worker in step.worker.items():
                by_worker.setdefault(worker, []).append(name)
            if by_worker.get(handle.number) or not by_worker:
                continue
            busiest = max(by_worker, key=lambda worker: len(by_worker[worker]))
            names = by_worker[busiest][(len(by_worker[busiest]) + 1) // 2 :]
            moves = {step.index[name]: handle.number for name in names}
            self.move(step, moves)
            step.moved |= moves
