"""The first process of a sandbox: puts up its walls, keeps the time, and sees that nothing is left.

Descriptor 0 holds two messages: what the answer's process may know, and the tests. To descriptor 1 go messages of how far the
tests have come; the first says which walls stand.
"""

from __future__ import annotations

import os
import signal
import sys

from . import namespaces, seccomp
from .children import fork
from .examiner import examine
from .libc import PR_SET_CHILD_SUBREAPER, PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS, drop_capabilities, prctl
from .wire import read_message, write_message

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_JOB, _REPORT = 0, 1
_MAX_JOB_BYTES = 2**30


def main() -> None:
    """Do the one job of this process."""
    job = read_message(_JOB, max_bytes=_MAX_JOB_BYTES)
    sys.path += job["folders"]
    sys.dont_write_bytecode = True
    null = os.open(os.devnull, os.O_RDWR)
    report = os.dup(_REPORT)
    os.dup2(null, _REPORT)  # tests may print what the answer returned, and whoever reads the report believes all of it
    missing = _put_up_walls(job)
    write_message(report, {"missing": missing})
    if set(missing) - set(job["unsafe_without"]):
        return
    prctl(PR_SET_CHILD_SUBREAPER, 1)  # whatever outlives the examiner is this process's to reap

    def work() -> None:
        prctl(PR_SET_DUMPABLE, 0)  # the answer's process has the same user, and may not look into this one
        prctl(PR_SET_NO_NEW_PRIVS, 1)
        drop_capabilities()
        examine(job, job_fd=_JOB, report_fd=report, null_fd=null, filtered="seccomp" not in missing)

    examiner = fork(work)
    signal.signal(signal.SIGALRM, lambda number, frame: os.kill(examiner, signal.SIGKILL))
    signal.setitimer(signal.ITIMER_REAL, job["time_limit_s"])
    _reap()


def _put_up_walls(job: dict[str, Any]) -> dict[str, str]:
    """Returns what this machine does not offer, with the kernel's words."""
    missing = {}
    try:
        namespaces.enter(job["folders"])
    except OSError as error:
        missing["namespaces"] = str(error.strerror)
    try:
        seccomp.check()
    except OSError as error:
        missing["seccomp"] = str(error.strerror)
    return missing


def _reap() -> None:
    while True:
        try:
            os.wait()
        except ChildProcessError:
            return
