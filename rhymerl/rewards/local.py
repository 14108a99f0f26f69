"""Rewards that run in this process: closures, and functions that need the device."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import KW_ONLY, dataclass
from itertools import islice
from typing import Any

from rhymerl.rewards.base import Reward
from rhymerl.rewards.calls import Call, Caller
from rhymerl.rewards.hooks import opened
from rhymerl.rewards.lines import Outcome


@dataclass(eq=False)
class LocalReward:
    """Calls one reward in chunks, and passes each outcome to `deliver(reward, key, outcome)` once.

    After a chunk it calls `poll`. Async functions run in an event loop on a thread of their own, because this thread
    may be running a loop already, as in a notebook.
    """

    reward: Reward
    deliver: Callable[[Reward, Any, Outcome], None]
    _: KW_ONLY
    chunk_size: int
    poll: Callable[[], None]

    def __post_init__(self) -> None:
        self._waiting: dict[Any, Call] = {}
        self._stack = ExitStack()
        self._arguments: Mapping[str, Any] | None = None
        self._runner = asyncio.Runner()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rewards") if self.reward.is_async else None

    def put(self, key: Any, call: Call) -> None:
        """Queue a call; with `where="main"` it runs now, or once a chunk of async or batch ones is full."""
        self._waiting[key] = call
        size = self.chunk_size if self.reward.batch or self.reward.is_async else 1
        if self.reward.where == "main" and len(self._waiting) >= size:
            self.run(list(self._waiting))

    def run(self, keys: Iterable[Any], *, extra: Mapping[str, Any] | None = None) -> None:
        """Make the queued calls that are among `keys`, in that order; `extra` keyword arguments go into every call."""
        if not self._waiting:
            return
        if self._arguments is None:
            self._arguments = opened(self.reward.call, self.reward.arguments, self._stack)
        caller = Caller(reward=self.reward, arguments={**self._arguments, **(extra or {})}, drive=self._drive)
        remaining = (key for key in keys if key in self._waiting)
        while chunk := list(islice(remaining, self.chunk_size)):
            calls = [self._waiting.pop(key) for key in chunk]
            for outcome in _outcomes(caller, calls):
                number = outcome.number
                (final,) = _outcomes(caller, [calls[number]]) if outcome.kind == "again" else (outcome,)
                self.deliver(self.reward, chunk[number], final)
            self.poll()

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
