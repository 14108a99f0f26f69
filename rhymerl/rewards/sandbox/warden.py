"""The first process of a sandbox: puts up its walls, keeps the time, and sees that nothing is left.

One descriptor holds two messages: what the answer's process may know, and the tests. Messages of how far the tests have
come go to another one. The first of them says which walls are missing; if the last is missing, this process was killed.
A reader that wants to hear no more closes it, and all ends.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Callable
from typing import Any

from . import namespaces, seccomp, users
from .children import NoProcessError, die_with_parent, fork, keep_only
from .examiner import examine
from .libc import PR_SET_CHILD_SUBREAPER, PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS, drop_capabilities, prctl
from .wire import read_message, write_message

_JOB, _NULL, _REPORT = 0, 1, 3
_MAX_JOB_BYTES = 2**30


def serve(job_fd: int, report_fd: int) -> None:
    """Do one job."""
    null = os.open(os.devnull, os.O_RDWR)
    keep_only([job_fd, null, null, report_fd])  # what tests print must not be in the report, which is believed
    try:
        _serve(read_message(_JOB, max_bytes=_MAX_JOB_BYTES))
    except NoProcessError as error:
        write_message(_REPORT, {"unavailable": str(error)})


def _serve(job: dict[str, Any]) -> None:
    sys.path += job["folders"]
    missing, user = _put_up_walls(job)
    die_with_parent()
    prctl(PR_SET_CHILD_SUBREAPER, 1)  # whatever outlives the examiner is this process's to reap
    over, running = os.pipe()  # the latter is open as long as there is an examiner

    def work() -> None:
        os.close(over)
        _give_up_rights(user)
        if "process_limit" not in missing:
            _try(missing, "process_limit", users.limit_processes)
        write_message(_REPORT, {"missing": missing})
        if set(missing) - set(job["unsafe_without"]):
            return
        try:
            examine(job, job_fd=_JOB, report_fd=_REPORT, null_fd=_NULL, filtered="seccomp" not in missing)
        except NoProcessError as error:
            write_message(_REPORT, {"unavailable": str(error)})

    examiner = fork(work)
    os.close(running)
    _wait(over, job["time_limit_s"])
    users.become(user)  # who may kill it without any right
    os.kill(examiner, signal.SIGKILL)
    _reap()
    write_message(_REPORT, {"ended": True})


def _put_up_walls(job: dict[str, Any]) -> tuple[dict[str, str], users.User]:
    """Returns what this machine does not offer, with the reason, and which user examiner and answer are to be."""
    missing: dict[str, str] = {}
    spare = users.spare()
    _try(missing, "namespaces", lambda: namespaces.enter(job["folders"], spare=spare))
    _try(missing, "seccomp", seccomp.check)
    apart = "namespaces" not in missing
    user = spare or users.own()
    _try(missing, "process_limit", lambda: users.check(user, folders=job["folders"], apart=apart))
    return missing, users.own() if "process_limit" in missing else user


def _try(missing: dict[str, str], wall: str, put_up: Callable[[], None]) -> None:
    try:
        put_up()
    except OSError as error:
        missing[wall] = str(error.strerror)


def _give_up_rights(user: users.User) -> None:
    """Give up all rights for good.

    The answer's process is the same user's, and may not look into this one.
    """
    os.setpgrp()  # the group of whoever started all this can be killed from within it
    users.become(user)
    die_with_parent()
    prctl(PR_SET_DUMPABLE, 0)
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    drop_capabilities()


def _wait(over: int, seconds: float) -> None:
    """Wait until the examiner is gone, nobody reads the report any more, or the time is up."""
    poll = select.poll()
    poll.register(over, select.POLLIN)
    poll.register(_REPORT, 0)  # which tells of errors alone
    poll.poll(seconds * 1000)


def _reap() -> None:
    while True:
        try:
            os.wait()
        except ChildProcessError:
            return
