"""A sandbox from outside: started for one answer, waited for, gone."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from time import monotonic
from typing import Any, Literal, get_args

from rhymerl.rewards.sandbox.wire import whole_messages, write_message

Wall = Literal["namespaces", "seccomp"]
WALLS: tuple[Wall, ...] = get_args(Wall)

_PROGRAM = "import sys; sys.path.insert(0, sys.argv[1]); from sandbox.warden import main; del sys.path[0]; main()"
# Nothing of the parent's: tokens and passwords are there. Sets of strings have one order; threads share one heap.
_ENVIRONMENT = {"PYTHONHASHSEED": "0", "MALLOC_ARENA_MAX": "1", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
_START_LIMIT_S = 10.0
_CHUNK_BYTES = 2**16


class SandboxError(RuntimeError):
    """No sandbox could be had; it says nothing about the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """An answer's code and what it is tried with; see `rhymerl.rewards.code` for the forms of tests."""

    code: str
    tests: Sequence[Any]
    entry_point: str | None = None
    is_program: bool = False
    stops_at_failure: bool = True
    time_limit_s: float = 5.0
    memory_mb: int = 512
    output_kb: int = 1024
    folders: Sequence[str] = ()  # of packages that the code may import
    unsafe_without: Sequence[Wall] = ()

    def message(self) -> dict[str, Any]:
        """What the answer's process may know."""
        names = ("code", "entry_point", "is_program", "stops_at_failure", "time_limit_s", "memory_mb", "output_kb")
        return {name: getattr(self, name) for name in names} | {
            "folders": list(self.folders),
            "unsafe_without": list(self.unsafe_without),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """How many tests passed; `failure` says why the first that did not failed, as far as that is known."""

    passed: int
    failure: str = ""
    missing: Mapping[str, str] = field(default_factory=dict)  # walls that this machine does not offer, and why


def run(job: Job) -> Report:
    """Try an answer. When this returns nothing of it is left. Raises SandboxError, whatever the answer does, only for the sandbox's own faults."""
    given = os.memfd_create("job")
    try:
        write_message(given, job.message())
        write_message(given, list(job.tests))
        os.lseek(given, 0, os.SEEK_SET)
        with subprocess.Popen(
            [sys.executable, "-s", "-S", "-P", "-X", "utf8", "-c", _PROGRAM, str(Path(__file__).parents[1])],
            stdin=given,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=_ENVIRONMENT,
            cwd="/",
        ) as process:
            try:
                return _report(process, job)
            finally:
                process.kill()
    except OSError as error:
        raise SandboxError(f"a sandbox cannot be started: {error}") from error
    finally:
        os.close(given)


def _report(process: subprocess.Popen[bytes], job: Job) -> Report:
    """Until the process is done. It keeps the time itself; that it might not is the sandbox's fault."""
    data = b""
    give_up = monotonic() + job.time_limit_s + _START_LIMIT_S
    assert process.stdout is not None
    while select.select([process.stdout], [], [], max(0.0, give_up - monotonic()))[0]:
        part = os.read(process.stdout.fileno(), _CHUNK_BYTES)
        if not part:
            return _summary(whole_messages(data), job)
        data += part
    raise SandboxError("a sandbox did not end in time")


def _summary(messages: Sequence[Mapping[str, Any]], job: Job) -> Report:
    if not messages:
        raise SandboxError("a sandbox did not come up")
    missing = messages[0]["missing"]
    lacking = [f"{wall} ({words})" for wall, words in missing.items() if wall not in job.unsafe_without]
    if lacking:
        raise SandboxError(f"this machine offers no {' and no '.join(lacking)}")
    failures = [message["failure"] for message in messages if "failure" in message]
    passed = sum("passed" in message for message in messages)
    whole = passed + len(failures) == len(job.tests)
    return Report(
        passed=passed, failure=(*failures, "" if whole else "the tests did not come to an end")[0], missing=missing
    )


@cache
def missing_walls() -> Mapping[str, str]:
    """What this machine does not offer, and why. Raises SandboxError when not even a process can be started."""
    return run(Job(code="x = 1", tests=["assert x == 1"], unsafe_without=WALLS)).missing
