"""The host of a worker's engine: it answers what it is asked on its own, and tells what is new to whoever polls."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

from rhymerl.backends.base import RolloutBackend
from rhymerl.backends.spans import EVALUATION, SpanLog
from rhymerl.budgets.base import Budget
from rhymerl.errors import BackendError
from rhymerl.history import HistoryStore
from rhymerl.types import Completion, Output, Prompt, RolloutRequest
from rhymerl.workers.messages import (
    Events,
    Learn,
    Measure,
    Message,
    Remember,
    Submit,
    Tail,
    Weights,
    WeightSource,
    Withdraw,
)

_SLICE_S = 0.05  # between two looks at the messages
_GAP_S = 0.005  # between passes that follow one another
_TELL_S = 0.5  # between two tellings of answers that go on
_AHEAD = 4  # requests of later steps beside those of an earlier one, whose passes they make longer

# Loads weights into the engine's policy, and starts the engine with the first of them.
Load = Callable[[WeightSource, int], RolloutBackend]


@dataclass(slots=True, kw_only=True)
class _Task:
    """A request that is not answered yet."""

    request: RolloutRequest
    rank: int
    oldest: int
    final: int
    is_running: bool = False  # in the engine
    output: Output | None = None  # of one that is not
    told: int = 0  # tokens

    def is_draft(self, version: int) -> bool:
        """Return whether what this policy samples is sampled again."""
        return version < self.final


class WorkerHost:
    """Answers requests in the order of their ranks. `load` gives the engine, once there are weights.

    `run` is called in a thread of its own, `post` and `poll` from others; or `step` from one alone, in lockstep, where
    the engine's `budget` learns nothing from evaluations.
    """

    def __init__(self, load: Load, *, history: HistoryStore, budget: Budget | None = None) -> None:
        self.version: int | None = None
        self._load = load
        self._history = history
        self._budget = budget
        self._learned: Mapping[str, Any] = {}  # by the budget, put aside during an evaluation
        self._backend: RolloutBackend | None = None
        self._tasks: dict[str, _Task] = {}
        self._inbox: deque[Message] = deque()
        self._events = Events()
        self._spans = SpanLog(gap_s=_GAP_S)
        self._changed = threading.Condition()
        self._told_at = 0.0
        self._is_settled = True  # the engine has what is to be sampled now
        self._only_evaluates = False
        self._is_closed = False

    # -- for others --------------------------------------------------------------------------------------------------

    def post(self, message: Message) -> None:
        """Take a message."""
        with self._changed:
            self._inbox.append(message)
            self._changed.notify_all()

    def poll(self, wait_s: float) -> Events:
        """Return what is new; where nobody waits for it, only after so long."""
        with self._changed:
            self._changed.wait_for(lambda: self._events.is_urgent or self._is_closed, wait_s)
            return self._taken()

    def close(self) -> None:
        """End `run` after its current pass."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _taken(self) -> Events:
        events, self._events = self._events, Events(version=self.version, history_bytes=self._history.bytes)
        events.spans = self._spans.take()
        return events

    # -- the engine's thread -----------------------------------------------------------------------------------------

    def run(self) -> None:
        """Work until it is closed, or has failed, which is told."""
        try:
            while not self._is_closed:
                with self._changed:
                    self._changed.wait_for(
                        lambda: self._inbox or self._is_closed or self._is_busy or not self._is_settled
                    )
                self._take_messages()
                self._decode(timeout_s=_SLICE_S)
                is_idle = not self._is_busy and self._is_settled  # until the next message, which may be long in coming
                if is_idle or time.monotonic() - self._told_at >= _TELL_S:
                    self._tell()
        except Exception as error:  # noqa: BLE001 - the trainer raises it
            with self._changed:
                self._events.error = error
                self._changed.notify_all()
        finally:
            self.release()

    def release(self) -> None:
        """Free the engine, once nobody works with it any more."""
        if self._backend is not None:
            self._backend.close()

    def step(self, max_passes: int, *, only_evaluates: bool = False) -> Events:
        """Take all messages, do at most so many passes, and return what is new; perhaps without requests of training steps."""
        try:
            self._rest(only_evaluates)
            self._take_messages()
            self._decode(max_passes=max_passes)
            self._tell()
        except Exception as error:  # noqa: BLE001 - the trainer raises it
            self._events.error = error
        return self._taken()

    def _rest(self, only_evaluates: bool) -> None:
        """Let requests of training steps leave the engine, or come back, and with them what the budget has learned."""
        if only_evaluates == self._only_evaluates:
            return
        self._only_evaluates, self._is_settled = only_evaluates, False
        self._take_out([task for task in self._tasks.values() if task.is_running and not self._may_run(task)])
        if self._budget is not None and only_evaluates:
            self._learned = deepcopy(self._budget.state_dict())
        elif self._budget is not None:
            self._budget.load_state_dict(self._learned)

    @property
    def _is_busy(self) -> bool:
        return any(task.is_running for task in self._tasks.values())

    def _take_messages(self) -> None:
        with self._changed:
            messages = list(self._inbox)
            self._inbox.clear()
        newest = max((each.version for each in messages if isinstance(each, Weights)), default=None)
        for message in messages:
            if not isinstance(message, Weights) or message.version == newest:
                self._follow(message)
        if messages or not self._is_settled:
            self._submit()

    def _follow(self, message: Message) -> None:
        match message:
            case Weights():
                self._take_weights(message)
            case Submit():
                self._take_requests(message)
            case Withdraw():
                self._give_back([self._tasks[name] for name in message.ids if name in self._tasks])
            case Remember():
                self._remember(message)
            case Learn():
                self._engine.learn(message.samples)
            case Measure():
                measured = self._engine.metrics()
                with self._changed:
                    self._events.measured.append(measured)
                    self._changed.notify_all()

    @property
    def _engine(self) -> RolloutBackend:
        if self._backend is None:
            raise BackendError("a worker has been asked before it had weights")
        return self._backend

    # -- weights and history -------------------------------------------------------------------------------------------

    def _take_weights(self, message: Weights) -> None:
        """Go on under the new policy; answers that are to be its own alone begin again, along what they have as drafts."""
        redone = [task for task in self._tasks.values() if task.final <= message.version and self._has_drafts(task)]
        self._take_out([task for task in redone if task.is_running])
        for task in redone:
            if task.output is not None and len(task.output):
                task.request = replace(task.request, prefetched=task.output.token_ids, output=None)
            task.output, task.told = None, 0
        is_first, started = self._backend is None, time.perf_counter()
        self._backend = self._load(message.source, message.version)
        if is_first:
            self._backend.follow(self._history)
        self.version = message.version
        self._events.version = message.version
        with self._changed:
            self._spans.note("weights", message.version, seconds=time.perf_counter() - started)

    def _has_drafts(self, task: _Task) -> bool:
        return self.version is not None and task.is_draft(self.version)

    def _remember(self, message: Remember) -> None:
        """Learn past answers, and tell which prompts had to go for them."""
        before = self._history.version
        for each in message.prompts:
            prompt = Prompt(id=each.key, key=each.key, token_ids=each.token_ids, text="")
            self._history.add(prompt, each.answers, each.split)
        gone = [(change.split, change.key) for change in self._history.deltas(before) if change.is_forgotten]
        with self._changed:
            self._events.forgotten += gone
            self._events.history_bytes = self._history.bytes
        if self._backend is not None:
            self._backend.follow(self._history)

    # -- requests ------------------------------------------------------------------------------------------------------

    def _take_requests(self, message: Submit) -> None:
        for request in message.requests:
            self._tasks[request.id] = _Task(
                request=request, rank=message.rank, oldest=message.oldest, final=message.final
            )

    def _submit(self) -> None:
        """Hand over to the engine what is to be sampled now, behind those of lower rank and before those of higher."""
        self._is_settled = True
        chosen = self._chosen()
        fresh = [task for task in chosen if not task.is_running]
        if not fresh:
            return
        first = fresh[0].rank
        self._take_out([task for task in self._tasks.values() if task.is_running and task.rank > first])
        tasks = [task for task in chosen if not task.is_running and self._may_run(task)]
        for task in tasks:
            task.is_running = True
        self._engine.submit([_from_here(task) for task in tasks])

    def _chosen(self) -> list[_Task]:
        """Return the requests of the lowest rank that may run, and behind them the first few of the others."""
        ready = sorted(
            (task for task in self._tasks.values() if task.is_running or self._may_run(task)),
            key=lambda task: task.rank,
        )
        num_first = sum(task.rank == ready[0].rank for task in ready)
        return ready[: num_first + _AHEAD]

    def _may_run(self, task: _Task) -> bool:
        is_over = task.output is not None and task.output.is_finished  # a whole draft waits for its policy
        rests = self._only_evaluates and task.rank != EVALUATION
        return self.version is not None and task.oldest <= self.version and not is_over and not rests

    def _give_back(self, tasks: Sequence[_Task]) -> None:
        self._take_out([task for task in tasks if task.is_running])
        left = [task for task in tasks if task.request.id in self._tasks]  # some may have ended meanwhile
        released = [(task.request.id, task.output or task.request.output or Output.of()) for task in left]
        for name, _ in released:
            del self._tasks[name]
        with self._changed:
            self._events.released += released
            self._changed.notify_all()

    def _take_out(self, tasks: Sequence[_Task]) -> None:
        """Withdraw running requests from the engine; those that have ended are done."""
        names = [task.request.id for task in tasks]
        for completion in self._engine.withdraw(names) if names else []:
            self._take(completion)

    def _decode(self, timeout_s: float | None = None, max_passes: int | None = None) -> None:
        if not self._is_busy:
            return
        started, rank = time.perf_counter(), min(task.rank for task in self._tasks.values() if task.is_running)
        found = self._engine.collect(timeout_s, max_passes=max_passes)
        for completion in found:
            self._take(completion)
        with self._changed:
            self._spans.note("decode", rank, seconds=time.perf_counter() - started)
            if self._events.is_urgent:
                self._changed.notify_all()

    def _take(self, completion: Completion) -> None:
        """Keep what there is of a request that has left the engine; an answer is told and forgotten."""
        task = self._tasks[completion.request.id]
        task.is_running, task.output, self._is_settled = False, completion.output, False
        if completion.output.is_finished and not self._has_drafts(task):
            del self._tasks[completion.request.id]
            with self._changed:
                self._events.finished.append((completion.request.id, completion.output))

    def _tell(self) -> None:
        """Tell how far answers are that go on."""
        self._told_at = time.monotonic()
        outputs = {each.request.id: each.output for each in self._backend.outputs()} if self._backend else {}
        resting = ((name, task.output) for name, task in self._tasks.items() if not task.is_running)
        outputs |= {name: output for name, output in resting if output is not None}
        tails = []
        for name, output in outputs.items():
            task = self._tasks[name]
            if len(output) > task.told:
                tails.append(Tail(id=name, start=task.told, output=output[task.told :]))
                task.told = len(output)
        with self._changed:
            self._events.tails += tails


def _from_here(task: _Task) -> RolloutRequest:
    output = task.output
    return task.request if output is None or not len(output) else replace(task.request, output=output)
