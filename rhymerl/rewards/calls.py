"""Calls of reward functions, in a reward process or in the trainer's own, and what comes of them."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, nan
from time import monotonic
from typing import Any, Literal, NamedTuple, Self, get_args

OutcomeKind = Literal["ok", "absent", "error", "timeout", "crash", "again"]

# A coroutine that is cut off this much after its time was not at fault: another one blocked the event loop.
_TIMER_SLACK_S = 0.1
_MAX_MESSAGE_CHARACTERS = 500


class Call(NamedTuple):
    """One sample for one reward function, with the columns that the function accepts."""

    text: str
    columns: Mapping[str, Any]


class Outcome(NamedTuple):
    """The outcome of one call.

    `absent`: the function does not apply; `again`: it failed with others, so it must be called alone.
    """

    position: int  # in the chunk
    kind: OutcomeKind
    value: float = nan
    message: str = ""
    finished_at: float = 0.0  # time.monotonic(), which all processes of a machine share

    @property
    def is_sound(self) -> bool:
        """Return whether it is of these types, as it came from another process."""
        return tuple(map(type, self)) == (int, str, float, str, float) and self.kind in get_args(OutcomeKind)


Emit = Callable[[Outcome], None]
Drive = Callable[[Coroutine[Any, Any, Any]], Any]  # runs a coroutine to its end


class Attempt:
    """Runs user code: `with Attempt() as attempt: …` keeps its exception, as an error and as one line."""

    error: BaseException | None = None
    message: str = ""
    value: float | None = nan

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        # User code may raise anything, SystemExit included, and none of it may end the run. Ctrl-C must.
        if error is None or isinstance(error, KeyboardInterrupt):
            return False
        self.error = error
        self.message = _describe(error)
        return True


def _describe(error: BaseException) -> str:
    """Return `ZeroDivisionError: division by zero (my_rewards.py:12)`, with the place of the innermost frame."""
    line = traceback.format_exception_only(error)[-1].strip()[:_MAX_MESSAGE_CHARACTERS]
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename != __file__ and not frame.filename.startswith("<")
    ]
    if not frames:
        return line
    return f"{line} ({frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno})"


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


def _checked(value: object) -> Attempt:
    with Attempt() as attempt:
        attempt.value = _number(value)
    return attempt


async def _within(seconds: float, awaitable: Coroutine[Any, Any, Any]) -> Any:
    import asyncio  # slow to import: only processes with async rewards pay for it

    async with asyncio.timeout(seconds):
        return await awaitable


def no_event_loop(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Stand in for a loop where no reward is async."""
    raise AssertionError("an async reward needs `drive`")


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Calls one reward function on chunks. An outcome is emitted as soon as it is known.

    A sync function is called sample by sample, in order; the coroutines of an async one run concurrently;
    a batch function is called once a chunk. Sync calls are not interrupted here, but judged when they end.
    """

    function: Callable[..., Any]
    batch: bool
    is_async: bool
    timeout_s: float
    arguments: Mapping[str, Any]  # passed to every call as they are
    drive: Drive

    def run(self, calls: Sequence[Call], emit: Emit) -> None:
        if self.batch:
            self._run_batch(calls, emit)
        elif self.is_async:
            self.drive(self._run_concurrently(calls, emit))
        else:
            self._run_in_order(calls, emit)

    def _run_in_order(self, calls: Sequence[Call], emit: Emit) -> None:
        for position, call in enumerate(calls):
            started = monotonic()
            with Attempt() as attempt:
                attempt.value = _number(self.function(call.text, **call.columns, **self.arguments))
            emit(self._outcome(position, attempt, late=monotonic() - started > self.timeout_s))

    async def _run_concurrently(self, calls: Sequence[Call], emit: Emit) -> None:
        import asyncio  # see _within

        async def run(position: int, call: Call) -> None:
            started = monotonic()
            with Attempt() as attempt:
                coroutine = self.function(call.text, **call.columns, **self.arguments)
                attempt.value = _number(await _within(self.timeout_s, coroutine))
            late_s = monotonic() - started - self.timeout_s
            if len(calls) > 1 and late_s > _TIMER_SLACK_S:
                emit(Outcome(position, "again"))
            else:
                emit(self._outcome(position, attempt, late=late_s > 0))

        await asyncio.gather(*(run(position, call) for position, call in enumerate(calls)))

    def _run_batch(self, calls: Sequence[Call], emit: Emit) -> None:
        started = monotonic()
        values: list[Any] = []
        with Attempt() as batch:
            values = self._batch_values(calls)
        late = monotonic() - started > self.timeout_s * len(calls)
        for position in range(len(calls)):
            if len(calls) > 1 and (batch.error is not None or late):
                emit(Outcome(position, "again"))
            else:
                attempt = batch if batch.error is not None else _checked(values[position])
                emit(self._outcome(position, attempt, late=late))

    def _batch_values(self, calls: Sequence[Call]) -> list[Any]:
        names = dict.fromkeys(name for call in calls for name in call.columns)
        columns = {name: [call.columns.get(name) for call in calls] for name in names}
        returned = self.function([call.text for call in calls], **columns, **self.arguments)
        if self.is_async:
            returned = self.drive(_within(self.timeout_s * len(calls), returned))
        values = list(returned)
        if len(values) != len(calls):
            raise ValueError(f"it returned {len(values)} rewards for {len(calls)} completions")
        return values

    def _outcome(self, position: int, attempt: Attempt, *, late: bool) -> Outcome:
        now = monotonic()
        if late:
            message = f"it took longer than {self.timeout_s:g} s"
            return Outcome(position, "timeout", message=message, finished_at=now)
        if attempt.error is not None:
            return Outcome(position, "error", message=attempt.message, finished_at=now)
        if attempt.value is None:
            return Outcome(position, "absent", finished_at=now)
        return Outcome(position, "ok", value=attempt.value, finished_at=now)
