"""The warm process of forkserver.py, seen from outside."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

_PACKAGES = str(Path(__file__).parents[1])  # this folder is imported from there, as a package of its own
_PROGRAM = (
    "import json, sys; sys.path.insert(0, sys.argv[1]); from sandbox.forkserver import main; del sys.path[0]; "
    "main(*map(json.loads, sys.argv[2:]))"
)
# Nothing of the parent's: tokens and passwords are there. Sets of strings have one order; threads share one heap.
_ENVIRONMENT = {"PYTHONHASHSEED": "0", "MALLOC_ARENA_MAX": "1", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
_START_LIMIT_S = 100.0  # imports included
_MAX_WORDS_BYTES = 1000


class SandboxError(RuntimeError):
    """No sandbox could be had; it says nothing about the answer."""


class UnavailableError(SandboxError):
    """There is none at the moment, for want of processes or namespaces for instance."""


class WarmProcess:
    """Has imported `modules`, from `folders` and Python's; ends with its opener. Threads may share it."""

    def __init__(self, *, folders: Sequence[str] = (), modules: Sequence[str] = ()) -> None:
        self._words = [json.dumps(list(folders)), json.dumps(list(modules))]
        self._lock = threading.Lock()
        self._closed = False
        self._process: subprocess.Popen[bytes] | None = None
        self._requests: socket.socket | None = None

    def open(self) -> None:
        """Start it where there is none, and wait until it is ready. Raises SandboxError."""
        with self._lock:
            if self._requests is None:
                self._start()

    def request(self, fds: Sequence[int]) -> None:
        """Have a child forked that gets these descriptors. Raises SandboxError."""
        with self._lock:
            if self._requests is None:
                self._start()
            assert self._requests is not None
            try:
                socket.send_fds(self._requests, [b"x"], fds)
            except OSError as error:
                self._end()
                raise UnavailableError(f"its warm process has gone: {error}") from error

    def close(self) -> None:
        """End it for good, and all that runs; may be called twice."""
        with self._lock:
            self._closed = True
            self._end()

    def _start(self) -> None:
        if self._closed:
            raise SandboxError("a sandbox was closed")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._requests = ours
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-s", "-S", "-P", "-X", "utf8", "-c", _PROGRAM, _PACKAGES, *self._words],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=_ENVIRONMENT,
                cwd="/",
            )
        except OSError as error:
            self._end()
            raise UnavailableError(f"a sandbox cannot be started: {error}") from error
        finally:
            theirs.close()
        ours.settimeout(_START_LIMIT_S)
        try:
            words = ours.recv(_MAX_WORDS_BYTES)
        except TimeoutError:
            words = b"it took too long"
        ours.settimeout(None)
        if words != b"ready":
            self._end()
            kind = SandboxError if words else UnavailableError
            raise kind(f"a sandbox did not come up: {words.decode() or 'its process ended'}")

    def _end(self) -> None:
        if self._requests is not None:
            self._requests.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._requests = self._process = None
