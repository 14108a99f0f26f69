"""A worker process: imports the reward functions, then answers sample by sample until its parent leaves.

Started by `rhymerl.rewards.pool` only. It imports this package and the users' modules, nothing heavy.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from functools import reduce
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from rhymerl.rewards.calls import Attempt, Call, Caller, Outcome


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
    """Work for one worker: calls of one reward, by its position in the list of functions."""

    reward: int
    calls: Sequence[Call]


class Started(NamedTuple):
    """The worker's first words. It is ready unless it says what failed."""

    reward: str = ""
    failure: str = ""


def main(connection_fd: int, lifeline_fd: int) -> None:
    """Serve the parent at the other end of `connection_fd` until it closes or dies."""
    for fd in (connection_fd, lifeline_fd):
        os.set_inheritable(fd, False)
    _die_with_parent(lifeline_fd)
    os.dup2(2, 1)  # what users print must not end up in the parent's output, which may be JSON
    connection: Connection[Any, Any] = Connection(connection_fd)
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        _serve(connection)


def _die_with_parent(lifeline_fd: int) -> None:
    """Have the kernel kill this process group, stuck C code and all, when the parent's lifeline closes."""
    if sys.platform == "linux":
        import fcntl

        fcntl.fcntl(lifeline_fd, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(lifeline_fd, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(lifeline_fd, fcntl.F_SETFL, fcntl.fcntl(lifeline_fd, fcntl.F_GETFL) | os.O_ASYNC)


def _serve(connection: Connection[Any, Any]) -> None:
    def emit(message: Outcome | Started) -> None:
        connection.send_bytes(pickle.dumps(message))

    specs: list[FunctionSpec] = pickle.loads(connection.recv_bytes())
    drive = _event_loop() if any(spec.is_async for spec in specs) else None
    callers = []
    for spec in specs:
        with Attempt() as attempt:
            callers.append(_caller(spec, drive))
        if attempt.error is not None:
            return emit(Started(spec.reward, attempt.message))
    emit(Started())
    while True:
        chunk: Chunk = pickle.loads(connection.recv_bytes())
        callers[chunk.reward].run(chunk.calls, emit)


def _event_loop() -> Callable[[Coroutine[Any, Any, Any]], Any]:
    """One loop for the life of the worker, so that users' clients and sessions outlive a chunk."""
    import asyncio

    return asyncio.Runner().run


def _caller(spec: FunctionSpec, drive: Callable[[Coroutine[Any, Any, Any]], Any] | None) -> Caller:
    module: Any = import_module(spec.module)
    function = reduce(getattr, spec.qualname.split("."), module)
    settings = {"drive": drive} if drive else {}
    return Caller(
        function=function,
        batch=spec.batch,
        is_async=spec.is_async,
        timeout_s=spec.timeout_s,
        arguments=spec.arguments,
        **settings,
    )
