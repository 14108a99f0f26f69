"""Rewards that run in this process: closures, and functions that need the device."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from math import inf
from typing import Any

from rhymerl.rewards.base import Reward
from rhymerl.rewards.calls import Call, Caller, Outcome
from rhymerl.rewards.hooks import opened


class LocalReward:
    """Calls one reward on samples and hands each outcome to `deliver(key, outcome)` once.

    A sync function cannot be stopped, so its value counts however long it took. Async ones run in an event
    loop on a thread of their own, because this thread may be running a loop already, as in a notebook.
    """

    def __init__(self, reward: Reward, deliver: Callable[[str, Outcome], None]) -> None:
        self.reward = reward
        self.deliver = deliver
        self._stack = ExitStack()
        self._arguments: Mapping[str, Any] | None = None
        self._runner = asyncio.Runner()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rewards") if reward.is_async else None

    def run(self, samples: Mapping[str, Call], *, extra: Mapping[str, Any] | None = None) -> None:
        """Score `samples` by key; `extra` keyword arguments go into every call."""
        if self._arguments is None:
            self._arguments = opened(self.reward.call, self.reward.arguments, self._stack)
        caller = Caller(
            function=self.reward.call,
            batch=self.reward.batch,
            is_async=self.reward.is_async,
            timeout_s=self.reward.timeout_s if self.reward.is_async else inf,
            arguments={**self._arguments, **(extra or {})},
            drive=self._drive,
        )
        keys = list(samples)
        for outcome in _outcomes(caller, list(samples.values())):
            key = keys[outcome.position]
            (final,) = _outcomes(caller, [samples[key]]) if outcome.kind == "again" else (outcome,)
            self.deliver(key, final)

    def close(self) -> None:
        """End the thread, and what the function has open; may be called twice."""
        self._stack.close()
        self._arguments = None
        if self._thread is not None:
            self._thread.submit(self._runner.close).result()
            self._thread.shutdown()
            self._thread = None

    def _drive(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        assert self._thread is not None, "only async rewards have coroutines, and none runs after close"
        return self._thread.submit(self._runner.run, coroutine).result()


def _outcomes(caller: Caller, calls: Sequence[Call]) -> list[Outcome]:
    outcomes: list[Outcome] = []
    caller.run(calls, outcomes.append)
    return outcomes
