"""The program of a reward process: it imports the reward functions, then scores samples until its parent leaves.

Started by `rhymerl.rewards.pool` only. It imports this package and the users' modules, nothing heavy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import reduce
from importlib import import_module
from typing import Any, NamedTuple

from rhymerl.rewards.calls import Attempt, Call, Caller, Drive, no_event_loop
from rhymerl.rewards.child import Parent
from rhymerl.rewards.hooks import opened
from rhymerl.rewards.lines import Ready, line_of


class FunctionSpec(NamedTuple):
    """A reward function by name: `FunctionSpec("score", "my_module", "Checks.score", …)`."""

    reward: str
    module: str
    qualname: str
    batch: bool
    is_async: bool
    timeout_s: float
    arguments: Mapping[str, Any]


class Chunk(NamedTuple):
    """Work for one process: calls of one reward, by its position in the list of functions."""

    reward: int
    calls: Sequence[Call]


def serve(parent: Parent) -> None:
    """Score chunks of calls; the first message has the functions."""
    specs: list[FunctionSpec] = parent.receive()
    drive: Drive = no_event_loop
    if any(spec.is_async for spec in specs):
        import asyncio  # slow to import

        drive = asyncio.Runner().run  # one loop for the life of the process: users' clients outlive a chunk
    callers = []
    with ExitStack() as stack:
        for spec in specs:
            with Attempt() as attempt:
                callers.append(_caller(spec, drive, stack))
            if attempt.error is not None:
                words = f"rewards.{spec.reward}: a reward process cannot import it: {attempt.message}"
                parent.send(line_of(Ready(failure=words)))
                return
        parent.send(line_of(Ready()))
        chunk: Chunk
        for chunk in parent.messages():
            callers[chunk.reward].run(chunk.calls, lambda outcome: parent.send(line_of(outcome)))


def _caller(spec: FunctionSpec, drive: Drive, stack: ExitStack) -> Caller:
    module: Any = import_module(spec.module)
    function = reduce(getattr, spec.qualname.split("."), module)
    return Caller(
        function=function,
        batch=spec.batch,
        is_async=spec.is_async,
        timeout_s=spec.timeout_s,
        arguments=opened(function, spec.arguments, stack),
        drive=drive,
    )
