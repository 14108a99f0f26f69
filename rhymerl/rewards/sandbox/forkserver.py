"""The warm process: it has imported everything, and forks for each job. It reads no job and runs no answer itself.

Requests come through the socket that is its descriptor 0: one byte, with the descriptors of a job and of its report.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module

from . import seccomp
from .children import NoProcessError, fork
from .memory import volunteer
from .remote import Caught
from .warden import serve
from .wire import write_message

_MAX_WORDS = 300  # characters
# What answers import most often.
_STANDARD = ("bisect", "collections", "copy", "dataclasses", "datetime", "functools", "heapq", "itertools", "math", "random", "re", "string", "typing")  # fmt: skip


def main(folders: Sequence[str], modules: Sequence[str]) -> None:
    """Say "ready", or why not, and serve until the other end of the socket is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for whoever started this
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the children
    volunteer()
    requests = socket.socket(fileno=0)
    requests.send(_import(folders, modules).encode() or b"ready")
    gc.collect()
    gc.freeze()  # children share these pages as long as the collector leaves them alone
    while True:
        message, fds, _, _ = socket.recv_fds(requests, 1, 2)
        if not message:
            return
        _fork_for(*fds)


def _import(folders: Sequence[str], modules: Sequence[str]) -> str:
    """Returns what failed."""
    sys.dont_write_bytecode = True
    sys.path += folders
    with Caught() as caught:
        for name in (*_STANDARD, *modules):
            import_module(name)
        seccomp.compiled(memory_mb=0)  # kept for those that come
    return "" if caught.error is None else f"{type(caught.error).__name__}: {caught.error}"[:_MAX_WORDS]


def _fork_for(job_fd: int, report_fd: int) -> None:
    def work() -> None:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        serve(job_fd, report_fd)

    try:
        fork(work)
    except NoProcessError as error:
        with suppress(OSError):
            write_message(report_fd, {"unavailable": str(error)})
    os.close(job_fd)
    os.close(report_fd)
