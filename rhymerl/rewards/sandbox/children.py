"""Processes that do one thing and end, and never longer than their parent."""

from __future__ import annotations

import fcntl
import os
import resource
import signal
from collections.abc import Callable, Sequence
from typing import Any

from . import seccomp
from .libc import PR_SET_PDEATHSIG, prctl

_SPARE_S = 1  # of processor time beyond the limit, which is the clock's
_MAX_FILES = 64
_ABOVE = 100  # all descriptors that there are


class NoProcessError(Exception):
    """The machine gives no process, which is not the fault of a program inside the sandbox."""


def fork(work: Callable[[], None]) -> int:
    """Fork a child that does `work` and ends, with 1 if that raises. Returns its pid; raises NoProcessError."""
    try:
        child = os.fork()
    except OSError as error:
        raise NoProcessError(f"no process to be had: {error.strerror}") from error
    if child:
        return child
    code = 1
    try:
        die_with_parent()
        work()
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    finally:
        os._exit(code)


def die_with_parent() -> None:
    """End with the parent; to be called again where this process has changed its user or its user namespace since."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def keep_only(fds: Sequence[int]) -> None:
    """Make `fds` the descriptors 0, 1, 2 …, and close all others."""
    for index, fd in enumerate([fcntl.fcntl(fd, fcntl.F_DUPFD, _ABOVE) for fd in fds]):
        os.dup2(fd, index)
    os.closerange(len(fds), 10 * _ABOVE)


def limit(job: dict[str, Any]) -> None:
    """Limit memory and processor time, for good."""
    seconds = int(job["time_limit_s"]) + _SPARE_S
    for kind, value in ((resource.RLIMIT_AS, job["memory_mb"] * 2**20), (resource.RLIMIT_CPU, seconds)):
        resource.setrlimit(kind, (value, value))


def confine(job: dict[str, Any], *, filtered: bool) -> None:
    """Set all limits, and the filter of system calls."""
    limit(job)
    for kind, value in ((resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_CORE, 0), (resource.RLIMIT_NOFILE, _MAX_FILES)):
        resource.setrlimit(kind, (value, value))
    if filtered:
        seccomp.install(memory_mb=job["memory_mb"])
