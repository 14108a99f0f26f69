"""Processes that run users' code, rewards and environments, seen from their parent."""

from __future__ import annotations

import os
import pickle
import secrets
import selectors
import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from time import monotonic
from typing import Any, Generic, TypeVar

from rhymerl.rewards.lines import StrayBytesError

# The parent's path is set before anything is imported: rhymerl and the users' modules are then the parent's.
_PROGRAM = (
    "import sys; sys.path[:] = sys.argv[4:]; from rhymerl.rewards.child import run; "
    "program, *fds = sys.argv[1:4]; del sys.argv[1:]; run(program, *map(int, fds))"
)
START_TIMEOUT_S = 120.0
GRACE_S = 0.25  # the process's own timers get the first word
_EXIT_TIMEOUT_S = 1.0
_READ_BYTES = 2**16
_MAX_LINE_BYTES = 2**24
_MARK = "RHYMERL_REWARD_PROCESS"  # in the environment of a reward process and of all that comes from it


class ChildProcess:
    """A Python process at the other end of `connection`, in a process group of its own.

    A pipe from this process kills the group when it closes: that also happens when this process dies in any way. A
    group of its own also keeps Ctrl-C away from it, and lets `end` reach what the user's code has started; daemons,
    which leave the group, are found by a mark in their environment. Raises OSError when it cannot be started.
    """

    def __init__(self, program: str, setup: Any, parse: Callable[[bytes], Any]) -> None:
        """Start the module `program` with a first message; `parse` reads its lines."""
        self.is_ready = False
        self.deadline = monotonic() + START_TIMEOUT_S
        self._parse = parse
        self._remainder = b""
        self.connection: Connection[Any, Any]
        self.connection, theirs = Pipe()
        their_pipe_end, self._parent_pipe = os.pipe()
        self._mark = f"{_MARK}={os.getpid()}-{secrets.token_hex(8)}"
        name, _, value = self._mark.partition("=")
        fds = (theirs.fileno(), their_pipe_end)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, program, *map(str, fds), *_python_path()],
                stdin=subprocess.DEVNULL,
                pass_fds=fds,
                process_group=0,
                env={"PYTHONHASHSEED": "0", **os.environ, name: value},  # sets of strings: one order in every process
            )
        except OSError:
            self.connection.close()
            os.close(self._parent_pipe)
            raise
        finally:
            theirs.close()
            os.close(their_pipe_end)
        with suppress(OSError):  # a process that is dead already shows when it is read from
            self.connection.send_bytes(pickle.dumps(setup))

    def read(self) -> Iterator[Any]:
        """Return all messages so far; wait only if none. Raises EOFError at the end, OSError and StrayBytesError."""
        data = os.read(self.connection.fileno(), _READ_BYTES)
        if not data:
            raise EOFError
        *lines, self._remainder = (self._remainder + data).split(b"\n")
        yield from map(self._parse, lines)
        if len(self._remainder) > _MAX_LINE_BYTES:
            raise StrayBytesError

    def end(self, *, at_once: bool) -> str:
        """Kill the process group, after a moment unless `at_once`; returns how the process ended."""
        if not at_once:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_EXIT_TIMEOUT_S)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        code = self._process.wait()
        os.close(self._parent_pipe)
        _kill_marked(self._mark)
        if code < 0:
            return f"its process was killed by {signal.Signals(-code).name}"
        return f"its process exited with code {code}"


Process = TypeVar("Process", bound=ChildProcess)


class Listener(Generic[Process]):
    """Hears what processes write, and hands each message to `take`.

    A process that has died, or into whose pipe something else was written than what it is `asked_for`, goes to `lose`
    with what is to be said of that: nothing where its ending says it.
    """

    def __init__(
        self, take: Callable[[Process, Any], None], lose: Callable[[Process, str], None], *, asked_for: str
    ) -> None:
        self._take = take
        self._lose = lose
        self._asked_for = asked_for
        self._selector = selectors.DefaultSelector()

    def add(self, process: Process) -> None:
        """Listen to a process, too."""
        self._selector.register(process.connection, selectors.EVENT_READ, process)

    def listen(self, timeout_s: float) -> None:
        """Take every message that is there, waiting up to `timeout_s` for the first."""
        while ready := self._selector.select(timeout_s):
            for key, _ in ready:
                self._read(key.data)
            timeout_s = 0.0

    def _read(self, process: Process) -> None:
        try:
            for message in process.read():
                self._take(process, message)
        except StrayBytesError:
            self._lose(process, f"something else than its {self._asked_for} was written into its process's pipe")
        except (EOFError, OSError):
            self._lose(process, "")

    def end(self, process: Process) -> str:
        """End a process at once, and listen to it no more; returns how it ended."""
        self._selector.unregister(process.connection)
        process.connection.close()
        return process.end(at_once=True)

    def close(self, processes: Collection[Process], is_busy: Callable[[Process], bool]) -> None:
        """End all processes, at once where they are busy. May be called twice."""
        for process in processes:
            process.connection.close()  # an idle one ends by itself
        for process in processes:
            process.end(at_once=is_busy(process))
        self._selector.close()


def _kill_marked(mark: str) -> None:
    """Kill the marked processes, where there is a /proc to look for them in."""
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if mark.encode() in path.read_bytes().split(b"\0"):
                os.kill(int(path.parent.name), signal.SIGKILL)


def _python_path() -> list[str]:
    here = os.getcwd()
    paths = [path or here for path in sys.path]
    return paths if here in paths else [*paths, here]
