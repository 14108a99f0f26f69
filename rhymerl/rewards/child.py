"""Processes that run users' code, rewards and environments, from within."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any

from rhymerl.rewards.sandbox.memory import volunteer


class Parent:
    """The parent of this process, seen from it: pickled messages come from it, and lines go to it.

    This process and all that it starts end with it.
    """

    def __init__(self, connection_fd: int, parent_pipe: int) -> None:
        for fd in (connection_fd, parent_pipe):
            os.set_inheritable(fd, False)
        _die_with_parent(parent_pipe)
        for number in (signal.SIGUSR1, signal.SIGUSR2):  # a cluster's scheduler sends them to all processes of a job
            signal.signal(number, signal.SIG_IGN)
        volunteer()  # what needs too much memory here is not to cost the trainer
        # Nobody else hears the parent or speaks to it.
        os.register_at_fork(after_in_child=partial(os.close, connection_fd))
        os.dup2(2, 1)  # what users print must not end up in the parent's output, which may be JSON
        self._connection: Connection[Any, Any] = Connection(connection_fd)
        self._lock, self._own_pid = threading.Lock(), os.getpid()

    def receive(self) -> Any:
        """Wait for the next message. Raises EOFError when the parent has closed the connection."""
        return pickle.loads(self._connection.recv_bytes())

    def messages(self) -> Iterator[Any]:
        """Yield messages until the parent closes the connection."""
        with suppress(EOFError, ConnectionResetError):
            while True:
                yield self.receive()

    def send(self, line: bytes) -> None:
        """Send a whole line; threads may share this."""
        if os.getpid() != self._own_pid:
            os._exit(0)  # a child that users' code has forked, and that has returned from it too
        with self._lock:
            while line:
                line = line[os.write(self._connection.fileno(), line) :]


def run(program: str, connection_fd: int, parent_pipe: int) -> None:
    """Call `serve(parent)` of the module `program`, until the parent closes the connection or dies."""
    serve = import_module(program).serve
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        serve(Parent(connection_fd, parent_pipe))


def _die_with_parent(parent_pipe: int) -> None:
    """Have the kernel kill this process group, stuck C code and all, when the parent's end of the pipe closes."""
    if sys.platform == "linux":
        import fcntl

        fcntl.fcntl(parent_pipe, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(parent_pipe, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(parent_pipe, fcntl.F_SETFL, fcntl.fcntl(parent_pipe, fcntl.F_GETFL) | os.O_ASYNC)
