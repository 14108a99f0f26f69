"""Sandboxes from outside: one is forked from a warm process for each answer, waited for, and gone."""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from time import monotonic, sleep
from typing import Any, Literal, Self, get_args

from rhymerl.rewards.sandbox.wire import decode, whole_messages, write_message

Wall = Literal["namespaces", "seccomp", "process_limit"]
WALLS: tuple[Wall, ...] = get_args(Wall)

_PACKAGES = str(Path(__file__).parents[1])  # this folder is imported from there, as a package of its own
_PROGRAM = (
    "import json, sys; sys.path.insert(0, sys.argv[1]); from sandbox.forkserver import main; del sys.path[0]; "
    "main(*map(json.loads, sys.argv[2:]))"
)
# Nothing of the parent's: tokens and passwords are there. Sets of strings have one order; threads share one heap.
_ENVIRONMENT = {"PYTHONHASHSEED": "0", "MALLOC_ARENA_MAX": "1", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
_WARM_UP_LIMIT_S = 100.0  # imports included
_MAX_WORDS_BYTES = 1000
_START_LIMIT_S = 10.0
_TRY_AGAIN_AFTER_S = (0.1, 0.3, 0.9)
_CHUNK_BYTES = 2**16
_ROOT = Path("/sys/fs/cgroup")


class SandboxError(RuntimeError):
    """No sandbox could be had; it says nothing about the answer."""


class UnavailableError(SandboxError):
    """There is none at the moment, for want of processes or namespaces for instance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """An answer's code and its tests; see `rhymerl.rewards.code` for the forms of tests.

    A test with an input and no output passes if its call returns a plain value, which the report then has.
    """

    code: str
    tests: Sequence[Any]
    entry_point: str | None = None
    is_program: bool = False
    stops_at_failure: bool = True
    time_limit_s: float = 5.0
    memory_mb: int = 512
    folders: Sequence[str] = ()  # of packages that the code may import
    unsafe_without: Sequence[Wall] = ()

    def message(self) -> dict[str, Any]:
        """Return the part that the answer's process may know."""
        names = [each.name for each in fields(self) if each.name != "tests"]
        return {name: getattr(self, name) for name in names} | {"unsafe_without": list(self.unsafe_without)}


@dataclass(frozen=True, slots=True, kw_only=True)
class JobResult:
    """The number of tests passed; `failure` says why the first that did not failed, as far as that is known.

    `unfit` says why no answer can be judged by these tests, and `values` are those that tests without an output
    returned.
    """

    passed: int
    failure: str = ""
    unfit: str = ""
    values: Sequence[Any] = ()
    missing: Mapping[str, str] = field(default_factory=dict)  # walls that this machine does not offer, and why


class Sandbox:
    """A place that tries each answer in its own sandbox, forked from a warm process. It is a context manager.

    The warm process has imported `modules`, from `folders` and Python's; it ends with its opener. Entering starts it if
    it can be had, and `run` does where there is none. Threads may share it.
    """

    def __init__(self, *, folders: Sequence[str] = (), modules: Sequence[str] = ()) -> None:
        self._words = [json.dumps(list(folders)), json.dumps(list(modules))]
        self._lock = threading.Lock()
        self._closed = False
        self._process: subprocess.Popen[bytes] | None = None
        self._requests: socket.socket | None = None

    def __enter__(self) -> Self:
        with suppress(UnavailableError), self._lock:
            self._connected()
        return self

    def __exit__(self, *of_an_error: object) -> None:
        self.close()

    def close(self) -> None:
        """End it for good, and all that runs; may be called twice."""
        with self._lock:
            self._closed = True
            self._end()

    def run(self, job: Job) -> JobResult:
        """Try an answer. When this returns nothing of it is left.

        Raises SandboxError, whatever the answer does, only for the sandbox's own faults; one for want of processes is
        tried again first.
        """
        for seconds in _TRY_AGAIN_AFTER_S:
            with suppress(UnavailableError):
                return self._try(job)
            sleep(seconds)
        return self._try(job)

    def _try(self, job: Job) -> JobResult:
        before = num_refused()
        report = _summary(whole_messages(self._messages(job)), job)
        if report.passed < len(job.tests) and num_refused() > before:
            raise UnavailableError("the machine refused processes or threads while an answer failed")
        return report

    def _messages(self, job: Job) -> bytes:
        try:
            report, written = os.pipe()
            with open(report, "rb", buffering=0):
                with open(written, "wb"), open(os.memfd_create("job"), "wb") as given:
                    write_message(given.fileno(), job.message())
                    write_message(given.fileno(), list(job.tests))
                    given.seek(0)
                    self._request([given.fileno(), written])
                return _read(report, limit_s=job.time_limit_s + _START_LIMIT_S)
        except OSError as error:
            raise SandboxError(f"a sandbox cannot be started: {error}") from error

    def _request(self, fds: Sequence[int]) -> None:
        """Have a child forked that gets these descriptors. Raises SandboxError."""
        with self._lock:
            requests = self._connected()
            try:
                socket.send_fds(requests, [b"x"], fds)
            except OSError as error:
                self._end()
                raise UnavailableError(f"its warm process has gone: {error}") from error

    def _connected(self) -> socket.socket:
        """Return the socket of the warm process, which is started where there is none. Raises SandboxError."""
        if self._requests is not None:
            return self._requests
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
        ours.settimeout(_WARM_UP_LIMIT_S)
        try:
            words = ours.recv(_MAX_WORDS_BYTES)
        except TimeoutError:
            words = b"it took too long"
        except OSError:
            words = b""
        ours.settimeout(None)
        if words != b"ready":
            self._end()
            kind = SandboxError if words else UnavailableError
            raise kind(f"a sandbox did not come up: {words.decode() or 'its process ended'}")
        return ours

    def _end(self) -> None:
        if self._requests is not None:
            self._requests.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._requests = self._process = None


def run(job: Job) -> JobResult:
    """Try one answer, with a warm process for it alone. Raises SandboxError."""
    with Sandbox() as sandbox:
        return sandbox.run(job)


def _read(report: int, *, limit_s: float) -> bytes:
    """Read the report until the sandbox is done.

    The sandbox keeps the time itself; if it does not, that is a SandboxError.
    """
    data = b""
    give_up = monotonic() + limit_s
    poll = select.poll()
    poll.register(report, select.POLLIN)
    while poll.poll(max(0.0, give_up - monotonic()) * 1000):
        part = os.read(report, _CHUNK_BYTES)
        if not part:
            return data
        data += part
    raise SandboxError("a sandbox did not end in time")


def _summary(messages: Sequence[Mapping[str, Any]], job: Job) -> JobResult:
    for message in messages:
        if "unavailable" in message:
            raise UnavailableError(f"a sandbox did not come up: {message['unavailable']}")
    if not messages or "ended" not in messages[-1]:
        raise UnavailableError("a sandbox was killed")
    missing = messages[0]["missing"]
    lacking = [f"{wall} ({words})" for wall, words in missing.items() if wall not in job.unsafe_without]
    if lacking:
        raise UnavailableError(f"this machine offers no {' and no '.join(lacking)}")
    failures = [message["failure"] for message in messages if "failure" in message]
    passed = sum("passed" in message for message in messages)
    whole = passed + len(failures) == len(job.tests)
    return JobResult(
        passed=passed,
        failure=(*failures, "" if whole else "the tests did not come to an end")[0],
        values=[decode(message["value"]) for message in messages if "value" in message],
        unfit=next((message["unfit"] for message in messages if "unfit" in message), ""),
        missing=missing,
    )


@cache
def missing_walls() -> Mapping[str, str]:
    """Return what this machine does not offer, and why. Raises SandboxError when not even a process can be started."""
    return run(Job(code="x = 1", tests=["assert x == 1"], unsafe_without=WALLS)).missing


def num_refused() -> int:
    """Return how many processes and threads the kernel has refused this group and its ancestors for lack of pids.

    The result is 0 where the group has no limit or cannot be seen, as in some containers.
    """
    return sum(_refused_by(folder / "pids.events") for folder in _folders())


def _folders() -> list[Path]:
    """Return the folder that limits processes, by cgroup's first or second version, and all folders above it."""
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            root = _ROOT / "pids" if controllers == "pids" else _ROOT
            folder = root / path.lstrip("/")
            if controllers in ("", "pids") and (folder / "pids.events").exists():
                return [folder, *(parent for parent in folder.parents if parent.is_relative_to(root))]
    return []


def _refused_by(events: Path) -> int:
    with suppress(OSError):
        for line in events.read_text().splitlines():
            name, _, count = line.partition(" ")
            if name == "max":
                return int(count)
    return 0
