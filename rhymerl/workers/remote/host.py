"""A host apart from the trainer: it acts on messages, on its own, and reports what is new to whoever polls."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from rhymerl.backends.base import RolloutBackend
from rhymerl.backends.spans import EVALUATION
from rhymerl.budgets.base import Budget
from rhymerl.drafters.base import Drafter
from rhymerl.environments.build import EpisodeSettings
from rhymerl.history import HistoryStore
from rhymerl.models.copies import copy_weights
from rhymerl.models.policy import Policy
from rhymerl.types import Autocast, Prompt
from rhymerl.workers.host import Host, HostJob
from rhymerl.workers.messages import (
    Events,
    HistoryUpdate,
    HostMessage,
    Learn,
    Measure,
    OutputDelta,
    Submit,
    Weights,
    WeightSource,
    Withdraw,
)

_SLICE_S = 0.05  # between two looks at the messages
_REPORT_S = 0.5  # between two reports of answers that go on
_BESIDE = 4  # requests of later steps beside those of an earlier one, whose passes they make longer

# Loads weights into the engine's policy, and starts the engine with the first of them.
Load = Callable[[WeightSource, int], RolloutBackend]


class WorkerHost(Host):
    """A host whose backend `load` gives, once there are weights.

    `run` is called in a thread of its own, `post` and `poll` from others; or `step` from one alone, in lockstep, where
    the engine's `budget` learns nothing from evaluations.
    """

    def __init__(self, load: Load, *, history: HistoryStore, budget: Budget | None = None) -> None:
        super().__init__(beside=_BESIDE)
        self._load = load
        self._history = history
        self._budget = budget
        self._learned: Mapping[str, Any] = {}  # by the budget, put aside during an evaluation
        self._inbox: deque[HostMessage] = deque()
        self._events = Events()
        self._changed = threading.Condition()  # what others see: messages, events and spans
        self._reported_at = 0.0
        self._only_evaluates = False
        self._is_closed = False

    # -- for others --------------------------------------------------------------------------------------------------

    def post(self, message: HostMessage) -> None:
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
        return events

    # -- the engine's thread -----------------------------------------------------------------------------------------

    def run(self) -> None:
        """Work until it is closed, or has failed, which is reported."""
        try:
            while not self._is_closed:
                with self._changed:
                    self._changed.wait_for(lambda: self._inbox or self._is_closed or not self._is_idle)
                self._take_messages()
                self.decode(timeout_s=_SLICE_S)
                # Where it is idle the next message may be long in coming.
                if self._is_idle or time.monotonic() - self._reported_at >= _REPORT_S:
                    self._report_outputs()
                self._report()
        except Exception as error:  # noqa: BLE001 - the trainer raises it
            self._report(error)
        finally:
            self.release()

    def release(self) -> None:
        """Free the backend, once nobody works with it any more."""
        if self._episodes is not None:
            self._episodes.close()
        if self._backend is not None:
            self._backend.close()

    def step(self, max_passes: int, *, only_evaluates: bool = False) -> Events:
        """Take messages, do at most `max_passes` passes, return what is new; `only_evaluates` lets training wait."""
        try:
            self._rest(only_evaluates)
            self._take_messages()
            self.decode(max_passes=max_passes)
            self._report_outputs()
            self._report()
        except Exception as error:  # noqa: BLE001 - the trainer raises it
            self._report(error)
        return self._taken()

    @property
    def _is_idle(self) -> bool:
        return self._is_up_to_date and not self.is_running and not self.num_waiting

    def _rest(self, only_evaluates: bool) -> None:
        """Let requests of training steps leave the backend, or come back, and with them what the budget has learned."""
        if only_evaluates == self._only_evaluates:
            return
        self._only_evaluates, self._is_up_to_date = only_evaluates, False
        self._take_out([job for job in self._jobs.values() if job.is_running and not self._may_run(job)])
        if self._budget is not None and only_evaluates:
            self._learned = deepcopy(self._budget.state_dict())
        elif self._budget is not None:
            self._budget.load_state_dict(self._learned)

    def _may_run(self, job: HostJob) -> bool:
        return super()._may_run(job) and (job.priority == EVALUATION or not self._only_evaluates)

    # -- messages ----------------------------------------------------------------------------------------------------

    def _take_messages(self) -> None:
        with self._changed:
            messages = list(self._inbox)
            self._inbox.clear()
        newest = max((each.version for each in messages if isinstance(each, Weights)), default=None)
        for message in messages:
            if not isinstance(message, Weights) or message.version == newest:
                self._follow(message)
        if messages:
            self._report()

    def _follow(self, message: HostMessage) -> None:
        match message:
            case EpisodeSettings():
                self._episodes = message.episodes()
            case Weights():
                self._take_weights(message)
            case Submit():
                self.submit(message.requests, priority=message.priority, versions=message.versions)
            case Withdraw():
                self.withdraw(message.ids)
                self._report()  # others wait for them
            case HistoryUpdate():
                self._update_history(message)
            case Learn():
                self.backend.learn(message.samples)
            case Measure():
                measured = self.metrics()
                with self._changed:
                    self._events.measured.append(measured)
                    self._changed.notify_all()

    def _take_weights(self, message: Weights) -> None:
        def load() -> RolloutBackend:
            backend = self._load(message.source, message.version)
            if self._backend is None:
                backend.follow(self._history)
            return backend

        self.renew(message.version, load)

    def _update_history(self, message: HistoryUpdate) -> None:
        """Learn past answers, and report which prompts had to go for them."""
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

    # -- reports -----------------------------------------------------------------------------------------------------

    def _report(self, error: Exception | None = None) -> None:
        """Let others see what has ended, and what was given back."""
        with self._changed:
            events = self._events
            events.error = events.error or error
            events.version = self.version
            events.finished += [(each.request.id, each.output) for each in self.finished]
            events.released += [(each.request.id, each.output) for each in self.released]
            events.spans += self.spans.take()
            if events.is_urgent:
                self._changed.notify_all()
        self.finished.clear()
        self.released.clear()

    def _report_outputs(self) -> None:
        """Report how far answers are that go on."""
        self._reported_at = time.monotonic()
        running = self._backend.outputs() if self._backend else []
        outputs = {each.request.id: self.whole(self._jobs[each.request.id], each.output) for each in running}
        waiting = ((name, job.output) for name, job in self._jobs.items() if not job.is_running)
        outputs |= {name: output for name, output in waiting if output is not None}
        deltas = []
        for name, output in outputs.items():
            job = self._jobs[name]
            if len(output) > job.reported:
                deltas.append(OutputDelta(id=name, start=job.reported, output=output[job.reported :]))
                job.reported = len(output)
        with self._changed:
            self._events.deltas += deltas


@dataclass(slots=True, kw_only=True)
class EngineLoader:
    """Makes the policy with the first weights, starts the engine on it, and copies later weights into it."""

    make_policy: Callable[[], Policy]
    engine: RolloutBackend
    drafter: Drafter
    budget: Budget | None = None
    autocast: Autocast = nullcontext
    _policy: Policy | None = None

    def __call__(self, source: WeightSource, version: int) -> RolloutBackend:
        is_first = self._policy is None
        policy = self._policy = self._policy or self.make_policy()
        copy_weights(policy.model, source().items())
        if is_first:
            self.engine.owns_policy = True
            self.engine.start(policy, self.drafter, budget=self.budget, autocast=self.autocast)
        self.engine.sync_weights(policy.named_weights(), version)
        return self.engine
