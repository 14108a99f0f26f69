"""Calls of reward functions, in a reward process or in the trainer's own, and what comes of them."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite, nan
from time import monotonic
from typing import Any, NamedTuple, Self

from rhymerl.hooks import describe_error
from rhymerl.rewards.lines import Outcome

# A coroutine that is cut off this much after its time was not at fault: another one blocked the event loop.
_TIMER_SLACK_S = 0.1


class Call(NamedTuple):
    """One sample for one reward function, with the columns that the function accepts."""

    text: str
    columns: Mapping[str, Any]


Emit = Callable[[Outcome], None]
Drive = Callable[[Coroutine[Any, Any, Any]], Any]  # runs a coroutine to its end


class Attempt:
    """Runs user code: `with Attempt() as attempt: …` keeps its exception, as an error and as one line, and its time."""

    error: BaseException | None = None
    message: str = ""
    value: float | None = nan
    took_s: float = 0.0

    def __enter__(self) -> Self:
        self._began = monotonic()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        self.took_s = monotonic() - self._began
        # User code may raise anything, SystemExit included, and none of it may end the run. Ctrl-C must.
        if error is None or isinstance(error, KeyboardInterrupt):
            return False
        self.error = error
        self.message = describe_error(error, without=(__file__,))
        return True


def _number(value: object) -> float | None:
    """Return a number (NumPy and 0-d tensors too) or None, by itself or as `score`. Raises TypeError or ValueError."""
    if isinstance(value, Mapping) and "score" in value:
        value = value["score"]
    if value is None:
        return None
    if not hasattr(type(value), "__float__"):
        raise TypeError(f"it returned {value!r:.80}, expected a number, or None where it does not apply")
    number = float(value)  # type: ignore[arg-type]
    if not isfinite(number):
        raise ValueError(f"it returned {number}, expected a finite number")
    return number


async def _within(seconds: float, awaitable: Coroutine[Any, Any, Any]) -> Any:
    import asyncio  # slow to import: only processes with async rewards pay for it

    async with asyncio.timeout(seconds):
        return await awaitable


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Calls one reward function on chunks. An outcome is emitted as soon as it is known.

    A sync function is called sample by sample, in order; the coroutines of an async one run concurrently;
    a batch function is called once a chunk. Sync calls are not interrupted here, but judged when they end, where that
    is a reward process: elsewhere their values count however long they took.
    """

    reward: Any  # a Reward
    arguments: Mapping[str, Any]  # passed to every call as they are
    drive: Drive

    @property
    def _limit_s(self) -> float:
        """Return the limit of one call."""
        return self.reward.timeout_s if self.reward.where == "pool" or self.reward.is_async else inf

    def run(self, calls: Sequence[Call], emit: Emit) -> None:
        if self.reward.batch:
            self._run_batch(calls, emit)
        elif self.reward.is_async:
            self.drive(self._run_concurrently(calls, emit))
        else:
            self._run_in_order(calls, emit)

    def _run_in_order(self, calls: Sequence[Call], emit: Emit) -> None:
        for number, call in enumerate(calls):
            with Attempt() as attempt:
                attempt.value = _number(self.reward.call(call.text, **call.columns, **self.arguments))
            emit(self._outcome(number, attempt))

    async def _run_concurrently(self, calls: Sequence[Call], emit: Emit) -> None:
        import asyncio  # see _within

        async def run(number: int, call: Call) -> None:
            with Attempt() as attempt:
                coroutine = self.reward.call(call.text, **call.columns, **self.arguments)
                attempt.value = _number(await _within(self._limit_s, coroutine))
            if len(calls) > 1 and attempt.took_s > self._limit_s + _TIMER_SLACK_S:
                emit(Outcome(number, "again"))
            else:
                emit(self._outcome(number, attempt))

        await asyncio.gather(*(run(number, call) for number, call in enumerate(calls)))

    def _run_batch(self, calls: Sequence[Call], emit: Emit) -> None:
        values: list[Any] = []
        with Attempt() as batch:
            values = self._batch_values(calls)
        share_s = batch.took_s / len(calls)
        for number in range(len(calls)):
            if len(calls) > 1 and (batch.error is not None or share_s > self._limit_s):
                emit(Outcome(number, "again"))
                continue
            with Attempt() as attempt:
                if batch.error is not None:
                    raise batch.error
                attempt.value = _number(values[number])
            attempt.took_s = share_s
            emit(self._outcome(number, attempt))

    def _batch_values(self, calls: Sequence[Call]) -> list[Any]:
        names = dict.fromkeys(name for call in calls for name in call.columns)
        columns = {name: [call.columns.get(name) for call in calls] for name in names}
        returned = self.reward.call([call.text for call in calls], **columns, **self.arguments)
        if self.reward.is_async:
            returned = self.drive(_within(self._limit_s * len(calls), returned))
        values = list(returned)
        if len(values) != len(calls):
            raise ValueError(f"it returned {len(values)} rewards for {len(calls)} completions")
        return values

    def _outcome(self, number: int, attempt: Attempt) -> Outcome:
        now = monotonic()
        if attempt.took_s > self._limit_s:
            return Outcome(number, "timeout", message=f"it took longer than {self._limit_s:g} s", finished_at=now)
        if attempt.error is not None:
            return Outcome(number, "error", message=attempt.message, finished_at=now)
        if attempt.value is None:
            return Outcome(number, "absent", finished_at=now)
        return Outcome(number, "ok", value=attempt.value, finished_at=now)
