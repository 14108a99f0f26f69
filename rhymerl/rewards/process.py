"""Processes that run users' code, rewards and environments, seen from their parent."""

from __future__ import annotations

import os
import pickle
import secrets
import selectors
import signal
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from time import monotonic
from typing import Any, ClassVar, Generic, TypeVar

from rhymerl.errors import RunError
from rhymerl.rewards.lines import START, Outcome, StrayBytesError, parse

# The parent's path is set before anything is imported: rhymerl and the users' modules are then the parent's.
_PROGRAM = (
    "import sys; sys.path[:] = sys.argv[4:]; from rhymerl.rewards.child import run; "
    "program, *fds = sys.argv[1:4]; del sys.argv[1:]; run(program, *map(int, fds))"
)
_START_TIMEOUT_S = 120.0
_START_AGAIN_AFTER_S = (0.1, 0.3, 0.9, 2.7)  # as starts fail while the machine has too many processes
GRACE_S = 0.25  # the process's own timers get the first word
_EXIT_TIMEOUT_S = 1.0
_READ_BYTES = 2**16
_MAX_LINE_BYTES = 2**24
_MARK = "RHYMERL_REWARD_PROCESS"  # in the environment of a reward process and of all that comes from it


class ChildProcess:
    """A Python process at the other end of `connection`, in a process group of its own.

    A pipe from this process kills the group when it closes: that also happens when this process dies in any way. A
    group of its own also keeps Ctrl-C away from it, and lets `end` reach what the user's code has started; daemons,
    which leave the group, are found by a mark in their environment. One that has ended can be started again.
    """

    def __init__(self, program: str, setup: Any) -> None:
        """Prepare to start the module `program` with a first message."""
        self._arguments = program, setup
        self.num_failed_starts = 0  # one after another
        self.start_not_before = 0.0
        self.pending: dict[int, Any] = {}  # the calls that it is at, by number
        self.is_running = False
        self.is_ready = False

    def start(self) -> None:
        """Raises OSError when it cannot be started."""
        program, setup = self._arguments
        self.heard_at = monotonic()
        self.deadline = self.heard_at + _START_TIMEOUT_S
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
        self.is_running = True
        with suppress(OSError):  # a process that is dead already shows when it is read from
            self.connection.send_bytes(pickle.dumps(setup))

    def read(self) -> Iterator[Outcome]:
        """Return all messages so far; wait only if none. Raises EOFError at the end, OSError and StrayBytesError."""
        data = os.read(self.connection.fileno(), _READ_BYTES)
        if not data:
            raise EOFError
        *lines, self._remainder = (self._remainder + data).split(b"\n")
        yield from map(parse, lines)
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
        self.is_running = self.is_ready = False
        os.close(self._parent_pipe)
        _kill_marked(self._mark)
        if code < 0:
            return f"its process was killed by {signal.Signals(-code).name}"
        return f"its process exited with code {code}"


Process = TypeVar("Process", bound=ChildProcess)


class ProcessPool(ABC, Generic[Process]):
    """Processes that call users' code. There is no thread: whoever waits for outcomes moves calls out and outcomes in.

    A process that died before it was ready is started again, after some time. `error` is raised, with the pool's name
    for a process, when one cannot work at all.
    """

    error: ClassVar[type[RunError]]
    name: ClassVar[str]  # such as "a reward process"
    asked_for: ClassVar[str]  # what the processes write
    shares_work: ClassVar[bool]  # any process can do what another was to do

    def __init__(self, processes: Sequence[Process]) -> None:
        self._processes = processes  # to be started where there is work for them
        self._selector = selectors.DefaultSelector()

    @abstractmethod
    def _take(self, process: Process, outcome: Outcome) -> None:
        """Take an outcome. Raises StrayBytesError for one that the process was not asked for."""

    @abstractmethod
    def _lose_calls(self, process: Process, message: str) -> None:
        """Settle the calls of a process that has ended, or queue them again; `message` says how it ended."""

    def close(self) -> None:
        """End all processes, at once where they are busy; unfinished calls are lost. May be called twice."""
        running = [process for process in self._processes if process.is_running]
        for process in running:
            process.connection.close()  # an idle one ends by itself
        for process in running:
            process.end(at_once=bool(process.pending) or not process.is_ready)
        self._selector.close()

    def _listen(self, timeout_s: float) -> None:
        """Take every message that is there, waiting up to `timeout_s` for the first."""
        while ready := self._selector.select(timeout_s):
            for key, _ in ready:
                self._read(key.data)
            timeout_s = 0.0
        starting = [each for each in self._processes if each.is_running and not each.is_ready]
        if any(each.deadline < monotonic() for each in starting):
            raise self.error(f"{self.name} did not start: it was not ready after {_START_TIMEOUT_S:g} s")

    def _read(self, process: Process) -> None:
        try:
            for outcome in process.read():
                process.heard_at = monotonic()
                if outcome.number != START:
                    self._take(process, outcome)
                elif outcome.kind != "ok" and not process.is_ready:
                    raise self.error(outcome.message)
                elif outcome.kind != "ok":
                    raise StrayBytesError
                elif not process.is_ready:  # else it is a sign of life
                    process.is_ready = True
                    process.num_failed_starts = 0
        except StrayBytesError:
            self._lose(process, f"something else than its {self.asked_for} was written into its process's pipe")
        except (EOFError, OSError):
            self._lose(process)

    def _start(self, process: Process) -> None:
        try:
            process.start()
        except OSError as error:
            self._start_later(process, str(error))
        else:
            self._selector.register(process.connection, selectors.EVENT_READ, process)

    def _start_later(self, process: Process, reason: str) -> None:
        """Let some time pass after a failed start. Raises `error` when too many failed and nobody does its work."""
        last = len(_START_AGAIN_AFTER_S) - 1
        is_replaced = self.shares_work and any(each.is_ready for each in self._processes)
        if process.num_failed_starts > last and not is_replaced:
            raise self.error(f"{self.name} did not start: {reason}")
        process.start_not_before = monotonic() + _START_AGAIN_AFTER_S[min(process.num_failed_starts, last)]
        process.num_failed_starts += 1

    def _lose(self, process: Process, message: str = "") -> None:
        """End a process that has died, or that writes something else than what it is asked for."""
        was_ready = process.is_ready
        ending = self._end(process)
        if not was_ready:
            self._start_later(process, ending)
        self._lose_calls(process, message or ending)

    def _end(self, process: Process) -> str:
        """End a process at once, and listen to it no more; returns how it ended."""
        self._selector.unregister(process.connection)
        process.connection.close()
        return process.end(at_once=True)


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
