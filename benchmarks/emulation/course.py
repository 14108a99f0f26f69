"""A run on the trainer's clock: headline.py's patches of the program that move that clock, and the run's figures."""

from __future__ import annotations

import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy as np

from benchmarks.emulation.virtual import TICK_S, VirtualWorkers
from rhymerl.history.sealed import SealedHistory
from rhymerl.training.module import RhymeModule
from rhymerl.training.updater import Updater
from rhymerl.types import RolloutRequest
from rhymerl.workers.coordinator import Coordinator
from rhymerl.workers.remote.hosted import HostedWorkers

if TYPE_CHECKING:
    from rhymerl.types import FloatArray


@dataclass(slots=True)
class Course:
    """A run on the trainer's clock."""

    update_s: float  # a response token
    weights_s: float
    ends: list[float] = field(default_factory=list)  # of steps, on the trainer's clock
    rollouts: list[float] = field(default_factory=list)  # seconds of each
    requests: list[Sequence[RolloutRequest]] = field(default_factory=list)  # of each
    lengths: list[list[int]] = field(default_factory=list)  # and the tokens of their answers
    between: list[tuple[float, float]] = field(default_factory=list)  # CPU time of the trainer beside the update
    metrics: list[dict[str, float]] = field(default_factory=list)
    updates: list[tuple[float, float]] = field(default_factory=list)
    workers: VirtualWorkers | None = None
    result: Mapping[str, Any] = field(default_factory=dict)
    spent: Counter[str] = field(default_factory=Counter)  # of all workers, as VirtualWorkers has it
    policies: Path | None = None  # a folder for the policy after each `epoch_steps`
    epoch_steps: int = 1
    held_out: list[float] = field(default_factory=list)  # rewards of other problems at the start and after each epoch
    _before: Counter[str] = field(default_factory=Counter)
    _cpu_s: float = 0.0
    _launched_s: float | None = None  # CPU time at which a rollout began whose requests are not out yet

    def watch(self, stack: ExitStack, *, waits_for_all: bool) -> None:
        """Move the trainer's clock and take figures; if it `waits_for_all`, rollouts begin after the last answer."""
        update, end = Updater.run, RhymeModule.on_train_batch_end
        answer, listen, sync = HostedWorkers.answer, HostedWorkers._listen_a_while, HostedWorkers.sync_weights

        def run(updater: Updater, *given: Any, **named: Any) -> Any:
            with self._off_the_clock():
                found = update(updater, *given, **named)
            assert self.workers is not None
            self.updates.append((self.workers.clock_s, self.workers.clock_s + self.workers.update_s))
            self.workers.clock_s += self.workers.update_s
            return found

        def sync_weights(workers: HostedWorkers, *given: Any) -> None:
            with self._off_the_clock():
                sync(workers, *given)

        def listened(workers: HostedWorkers, step: Any) -> None:
            if self._launched_s is not None:
                self._wait(time.thread_time() - self._launched_s)
                self._launched_s = None
            listen(workers, step)
            assert self.workers is not None
            self.workers.clock_s += self.workers.ticks_per_exchange * TICK_S

        def answers(workers: HostedWorkers, work: Any) -> Iterator[Any]:
            self.workers = workers.backend
            self.workers.update_s, self.workers.weights_s = 0.0, self.weights_s
            if work.number is not None and not self.rollouts:
                self._before = self.workers.spent
            if work.number is not None and self.rollouts:
                self._wait(time.thread_time() - self._cpu_s)
            at_s, lengths = self.workers.clock_s, {}
            self._launched_s = time.thread_time() if work.number is not None else None
            for completion in answer(workers, work):
                lengths[completion.request.id] = len(completion.output)
                self.workers.update_s += self.update_s * len(completion.output)
                yield completion
            if work.number is None:
                self.workers.clock_s = at_s  # an evaluation takes no time
            else:
                self.rollouts.append(self.workers.clock_s - at_s)
                self.lengths.append([lengths[request.id] for request in work.requests])
                self.requests.append(work.requests)
            self._cpu_s = time.thread_time()

        def on_train_batch_end(module: RhymeModule, *rest: Any) -> None:
            assert self.workers is not None
            self.ends.append(self.workers.clock_s)
            self.spent = self.workers.spent - self._before
            self.metrics.append({name: float(value) for name, value in module.trainer.callback_metrics.items()})
            if self.policies is not None and len(self.ends) % self.epoch_steps == 0:
                with self._off_the_clock():
                    module.policy.save(self.policies / str(len(self.ends)))
            end(module, *rest)

        stack.enter_context(patch.object(Updater, "run", run))
        stack.enter_context(patch.object(RhymeModule, "on_train_batch_end", on_train_batch_end))
        stack.enter_context(patch.object(HostedWorkers, "answer", answers))
        stack.enter_context(patch.object(HostedWorkers, "_listen_a_while", listened))
        stack.enter_context(patch.object(HostedWorkers, "sync_weights", sync_weights))
        stack.enter_context(patch.object(SealedHistory, "_submit", _at_once))
        if waits_for_all:
            stack.enter_context(patch.object(Coordinator, "_is_nearly_done", lambda *_: False))

    def _wait(self, cpu_s: float) -> None:
        """Let workers wait for so many seconds of the trainer's CPU time."""
        assert self.workers is not None
        begun = self.workers.clock_s
        self.workers.clock_s += self.workers.cpu * cpu_s
        self.between.append((begun, self.workers.clock_s))

    @contextmanager
    def _off_the_clock(self) -> Iterator[None]:
        started = time.thread_time()
        try:
            yield
        finally:
            self._cpu_s += time.thread_time() - started

    def idle_s(self, windows: Sequence[tuple[float, float]], num_workers: int) -> float:
        """Return the seconds of all workers within these times in which they decoded nothing."""
        assert self.workers is not None
        start, end = np.array([(span.start_s, span.end_s) for span in self.workers.spans]).T
        worked = sum(
            np.clip(np.minimum(end, over) - np.maximum(start, begun), 0, None).sum() for begun, over in windows
        )
        return num_workers * sum(over - begun for begun, over in windows) - float(worked)

    def least_s(self, num_workers: int, max_running: int) -> float:
        """Return the seconds of all rollouts on full workers without wasted nodes, at the run's acceptance length."""
        assert self.workers is not None
        device, lengths = self.workers.devices[0], np.concatenate(self.lengths).astype(float)
        prompts = np.array([len(each.prompt.token_ids) for requests in self.requests for each in requests])
        keys = float((lengths * (prompts + lengths / 2)).sum() / lengths.sum())
        tokens = self.spent["tokens"] / self.spent["request_passes"]
        of_tokens = float(device.curve.seconds(0, np.array([max_running * tokens]), 0)[0])
        a_pass = of_tokens + device.context_s_per_token * max_running * keys
        return float(lengths.sum() / (max_running * tokens) * a_pass / num_workers)

    def mean(self, name: str) -> float:
        return statistics.fmean(step[name] for step in self.metrics[1:])

    @property
    def epochs_s(self) -> list[float]:
        """Return when each epoch ended."""
        return self.ends[self.epoch_steps - 1 :: self.epoch_steps]

    @property
    def answers(self) -> tuple[list[list[int]], list[float]]:
        """What tells two runs with other answers apart: their lengths, and the reward of each step."""
        return self.lengths, [step["reward"] for step in self.metrics]

    def rewards(self, window: int) -> FloatArray:
        """Return the mean reward of each so many steps in a row, [steps - window + 1]."""
        return np.convolve([step["reward"] for step in self.metrics], np.full(window, 1 / window), "valid")

    @property
    def length_correlation(self) -> float | None:
        """Return the correlation of prompts' mean lengths with the epoch before; None if all are equally long."""
        means = defaultdict[str, list[float]](list)
        for requests, lengths in zip(self.requests, self.lengths, strict=True):
            of_prompt = defaultdict[str, list[int]](list)
            for request, length in zip(requests, lengths, strict=True):
                of_prompt[request.prompt.id].append(length)
            for name, found in of_prompt.items():
                means[name].append(statistics.fmean(found))
        before, after = np.array([pair for each in means.values() for pair in pairwise(each)]).T
        return round(float(np.corrcoef(before, after)[0, 1]), 3) if before.std() and after.std() else None

    @property
    def seconds(self) -> float:
        return self.ends[-1]


def _at_once(history: SealedHistory, build: Callable[[], Any]) -> Future[Any]:
    """Build an index in the thread that asks, whose CPU time is counted, instead of one beside it."""
    built: Future[Any] = Future()
    built.set_result(build())
    return built
