"""The end of a rank with the process that has started it: nobody else would tell a rank that waits, or is stopped.

Linux only; elsewhere nothing happens.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_LAUNCHER = "RHYMERL_LAUNCHER"
_SET, _GET = 1, 2  # PR_SET_PDEATHSIG, PR_GET_PDEATHSIG


@contextmanager
def as_launcher() -> Iterator[None]:
    """Context in which a rank that is started from here knows by whom."""
    before = os.environ.get(_LAUNCHER)
    if "LOCAL_RANK" not in os.environ:
        os.environ[_LAUNCHER] = str(os.getpid())
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(_LAUNCHER, None)
        else:
            os.environ[_LAUNCHER] = before


def end_with_parent() -> None:
    """Have the kernel kill this process as soon as its parent ends, until there is a failure detector.

    For ranks that rank 0 has started, as Lightning's launcher does. Where rank 0 was not `as_launcher`, that is when
    its command is the same: a shell, or a program of the user's that starts all ranks, may well end before them. Raises
    SystemExit when rank 0 is known to have ended.
    """
    if os.environ.get("LOCAL_RANK", "0") == "0":
        return
    launcher = os.environ.get(_LAUNCHER)
    if launcher is not None or _is_of_same_command(os.getppid()):
        _set(signal.SIGKILL)
        if launcher is not None and os.getppid() != int(launcher):
            raise SystemExit("error: rank 0 has ended before the ranks have met")


def have_met() -> None:
    """Let this process go on when its parent ends: from now on it detects the end of another rank itself.

    If it is stopped, it has to go on to do so.
    """
    if _get() == signal.SIGKILL:
        _set(signal.SIGCONT)


def _is_of_same_command(process: int) -> bool:
    with suppress(OSError):
        theirs = Path(f"/proc/{process}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
        mine = [os.fsencode(word) for word in sys.argv[1:]]
        has_same_words = not mine or theirs[-len(mine) :] == mine
        return has_same_words and os.readlink(f"/proc/{process}/exe") == os.readlink("/proc/self/exe")
    return False


def _set(number: signal.Signals) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET, ctypes.c_ulong(number))


def _get() -> int:
    found = ctypes.c_int(0)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_GET, ctypes.byref(found))
    return found.value
