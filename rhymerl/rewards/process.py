"""One reward process, seen from its parent."""

from __future__ import annotations

import os
import pickle
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

from rhymerl.rewards.calls import Outcome, StrayBytesError, outcome_of
from rhymerl.rewards.process_main import FunctionSpec

# The parent's path is set before anything is imported: rhymerl and the users' modules are then the parent's.
_PROGRAM = (
    "import sys; sys.path[:] = sys.argv[3:]; from rhymerl.rewards.process_main import main; "
    "fds = map(int, sys.argv[1:3]); del sys.argv[1:]; main(*fds)"
)
_EXIT_TIMEOUT_S = 1.0
_MAX_LINE_BYTES = 2**16
_MARK = "RHYMERL_REWARD_PROCESS"  # in the environment of a reward process and of all that comes from it


class RewardProcess:
    """A Python process at the other end of `connection`, in a process group of its own.

    A pipe from this process kills the group when it closes: that also happens when this process dies in any way.
    A group of its own also keeps Ctrl-C away from it, and lets `end` reach what the user's code has started; daemons, which
    leave the group, are found by a mark in their environment. Raises OSError when it cannot be started.
    """

    def __init__(self, specs: Sequence[FunctionSpec]) -> None:
        self.connection: Connection[Any, Any]
        self.connection, theirs = Pipe()
        their_pipe_end, self._parent_pipe = os.pipe()
        self._mark = f"{_MARK}={os.getpid()}-{secrets.token_hex(8)}"
        name, _, value = self._mark.partition("=")
        fds = (theirs.fileno(), their_pipe_end)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, *map(str, fds), *_python_path()],
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
        self._unread = b""  # the beginning of a line
        with suppress(OSError):  # a process that is dead already shows when it is read from
            self.connection.send_bytes(pickle.dumps(list(specs)))

    def read(self) -> Iterator[Outcome]:
        """Return what there is by now; wait only where there is nothing. Raises EOFError at the end, OSError and StrayBytesError."""
        data = os.read(self.connection.fileno(), _MAX_LINE_BYTES)
        if not data:
            raise EOFError
        *lines, self._unread = (self._unread + data).split(b"\n")
        yield from map(outcome_of, lines)
        if len(self._unread) > _MAX_LINE_BYTES:
            raise StrayBytesError

    def hang_up(self) -> None:
        """Close the connection: an idle process ends by itself."""
        self.connection.close()

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
