"""Scores completions as they finish: what the RolloutLoop sees of rewards."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import islice
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from rhymerl.rewards.base import Reward
from rhymerl.rewards.calls import Call, Outcome
from rhymerl.rewards.failures import Failures
from rhymerl.rewards.local import LocalReward
from rhymerl.rewards.pool import PendingCall, RewardPool

if TYPE_CHECKING:
    import torch

_FAILURES = {"error": "errors", "timeout": "timeouts", "crash": "crashes"}
_LOG = logging.getLogger(__name__)


class RewardScorer:
    """Runs every reward on every submitted sample. A context manager: leaving it ends the reward processes.

    `chunk_size` is how many samples a process gets at once, and so how many coroutines of an async reward run
    at the same time in a process. Raises ValueError when a value is out of range or two names are equal.
    """

    def __init__(self, rewards: Sequence[Reward], *, num_processes: int = 2, chunk_size: int = 16) -> None:
        for name, value in {"num_processes": num_processes, "chunk_size": chunk_size}.items():
            if value < 1:
                raise ValueError(f"{name}={value}: expected at least 1")
        self.rewards = list(rewards)
        names = [reward.name for reward in self.rewards]
        if len(set(names)) < len(names):
            raise ValueError(f"rewards={names}: expected distinct names")
        self.chunk_size = chunk_size
        self._selectors = [reward.column_selector() for reward in self.rewards]
        self._defaults = {reward.name: reward.default for reward in self.rewards}
        self._scores: dict[str, dict[str, float]] = {}
        self._num_failed: Counter[str] = Counter()
        self._logged: set[str] = set()
        self._failures = Failures()
        pooled = [reward for reward in self.rewards if reward.where == "pool"]
        self._pool = RewardPool(pooled, self._deliver_task, num_processes=num_processes, chunk_size=chunk_size)
        self._local = {
            reward.name: LocalReward(reward, partial(self._deliver, reward))
            for reward in self.rewards
            if reward.where != "pool"
        }
        self._waiting: dict[str, dict[str, Call]] = {name: {} for name in self._local}  # calls by reward and key
        self._put = [self._putter(reward, pooled) for reward in self.rewards]

    def submit(self, key: str, text: str, columns: Mapping[str, Any]) -> None:
        """Queue a sample; where='main' runs now (async and batch functions once a chunk of them is full).

        Raises RewardError when a reward process cannot work at all.
        """
        if key in self._scores:
            raise ValueError(f"key={key!r}: submitted twice")
        self._scores[key] = dict(self._defaults)
        for put, select in zip(self._put, self._selectors, strict=True):
            put(key, Call(text, select(columns)))
        if len(self._scores) % self.chunk_size == 0:
            self._pool.poll()

    def collect(
        self, device: torch.device | str | None = None, *, order: Sequence[str] | None = None
    ) -> dict[str, dict[str, float]]:
        """Wait for all samples: rewards by key, then by name, in the order of submission or in `order`.

        Rewards with where='engine' run here, in that order, so give one that no timing changes. Raises
        RewardError when a reward process cannot work at all.
        """
        keys = list(self._scores) if order is None else list(order)
        if len(keys) != len(self._scores) or set(keys) != set(self._scores):
            raise ValueError(f"order: expected the {len(self._scores)} submitted keys, each once")
        self._pool.flush()
        for reward in self.rewards:
            if reward.where == "main":
                self._run_waiting(reward, list(self._waiting[reward.name]))
            elif reward.where == "engine":
                self._run_waiting(reward, keys, extra={"device": device} if reward.takes_device else {})
        self._pool.drain()
        scores, self._scores = self._scores, {}
        self._failures += Failures(num_samples=len(scores))
        return {key: scores[key] for key in keys}

    def metrics(self) -> dict[str, float]:
        """Return the failed calls since the last call of this, by reward and kind: `rewards/{name}/errors`."""
        names = [f"rewards/{reward.name}/{kind}" for reward in self.rewards for kind in _FAILURES.values()]
        counts, self._num_failed = self._num_failed, Counter()
        return {name: counts[name] for name in names}

    def failures(self) -> Failures:
        """Return the failures of the samples that were collected since the last call of this."""
        failures, self._failures = self._failures, Failures()
        return failures

    def close(self) -> None:
        """End the reward processes; unfinished work is lost. May be called twice."""
        self._pool.close()
        for local in self._local.values():
            local.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _putter(self, reward: Reward, pooled: Sequence[Reward]) -> Callable[[str, Call], None]:
        if reward.where == "pool":
            index = pooled.index(reward)
            return lambda key, call: self._pool.put(PendingCall(index, key, call))
        waiting = self._waiting[reward.name]
        if reward.where == "engine":
            return waiting.__setitem__
        size = self.chunk_size if reward.batch or reward.is_async else 1

        def run_when_full(key: str, call: Call) -> None:
            waiting[key] = call
            if len(waiting) >= size:
                self._run_waiting(reward, list(waiting))

        return run_when_full

    def _run_waiting(self, reward: Reward, keys: Sequence[str], *, extra: Mapping[str, Any] | None = None) -> None:
        waiting = self._waiting[reward.name]
        remaining = iter(keys)
        while chunk := list(islice(remaining, self.chunk_size)):
            self._local[reward.name].run({key: waiting.pop(key) for key in chunk}, extra=extra)
            self._pool.poll()

    def _deliver_task(self, task: PendingCall, outcome: Outcome) -> None:
        self._deliver(self._pool.rewards[task.reward], task.key, outcome)

    def _deliver(self, reward: Reward, key: str, outcome: Outcome) -> None:
        if outcome.kind == "ok":
            self._scores[key][reward.name] = outcome.value
            return
        metric = f"rewards/{reward.name}/{_FAILURES[outcome.kind]}"
        self._num_failed[metric] += 1
        self._failures += Failures(num_failed={reward.name: 1}, first={reward.name: outcome.message})
        if metric not in self._logged:
            self._logged.add(metric)
            _LOG.warning(
                "%s: failed on sample %s, which gets %g: %s (more of this kind are only counted, as %s)",
                reward.setting,
                key,
                reward.default,
                outcome.message,
                metric,
            )
