"""The program of a reward process: it imports the reward functions, then scores samples until its parent leaves.

Started by `rhymerl.rewards.pool` only. It imports this package and the users' modules, nothing heavy.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial, reduce
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from rhymerl.rewards.calls import Attempt, Call, Caller, Drive, Outcome, no_event_loop
from rhymerl.rewards.hooks import opened
from rhymerl.rewards.lines import line_of
from rhymerl.rewards.sandbox.memory import volunteer


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


def main(connection_fd: int, parent_pipe: int) -> None:
    """Serve the parent at the other end of `connection_fd` until it closes or dies."""
    connection = connected(connection_fd, parent_pipe)
    with ExitStack() as stack, suppress(EOFError, BrokenPipeError, ConnectionResetError):
        _serve(connection, stack)


def connected(connection_fd: int, parent_pipe: int) -> Connection[Any, Any]:
    """Return the connection to the parent, with which this process and all that it starts end."""
    for fd in (connection_fd, parent_pipe):
        os.set_inheritable(fd, False)
    _die_with_parent(parent_pipe)
    for number in (signal.SIGUSR1, signal.SIGUSR2):  # a cluster's scheduler sends them to all processes of a job
        signal.signal(number, signal.SIG_IGN)
    volunteer()  # a reward that needs too much memory is not to cost the trainer
    os.register_at_fork(after_in_child=partial(os.close, connection_fd))  # nobody else hears the parent or speaks to it
    os.dup2(2, 1)  # what users print must not end up in the parent's output, which may be JSON
    return Connection(connection_fd)


def _die_with_parent(parent_pipe: int) -> None:
    """Have the kernel kill this process group, stuck C code and all, when the parent's end of the pipe closes."""
    if sys.platform == "linux":
        import fcntl

        fcntl.fcntl(parent_pipe, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(parent_pipe, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(parent_pipe, fcntl.F_SETFL, fcntl.fcntl(parent_pipe, fcntl.F_GETFL) | os.O_ASYNC)


def _serve(connection: Connection[Any, Any], stack: ExitStack) -> None:
    own_pid = os.getpid()

    def emit(outcome: Outcome) -> None:
        if os.getpid() != own_pid:
            os._exit(0)  # a child that the function has forked, and that has returned from it too
        data = line_of(outcome)
        while data:
            data = data[os.write(connection.fileno(), data) :]

    specs: list[FunctionSpec] = pickle.loads(connection.recv_bytes())
    drive: Drive = no_event_loop
    if any(spec.is_async for spec in specs):
        import asyncio  # slow to import

        drive = asyncio.Runner().run  # one loop for the life of the process: users' clients outlive a chunk
    callers = []
    for spec in specs:
        with Attempt() as attempt:
            callers.append(_caller(spec, drive, stack))
        if attempt.error is not None:
            words = f"rewards.{spec.reward}: a reward process cannot import it: {attempt.message}"
            return emit(Outcome(0, "error", message=words))
    emit(Outcome(0, "ok"))
    while True:
        chunk: Chunk = pickle.loads(connection.recv_bytes())
        callers[chunk.reward].run(chunk.calls, emit)


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
