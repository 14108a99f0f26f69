"""The system calls that Python has no function for."""

from __future__ import annotations

import ctypes
import errno
import os
from typing import Any

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_SECCOMP = 22
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38
_CAPABILITY_VERSION = 0x2008_0522

_LIBC = ctypes.CDLL(None, use_errno=True)


def call(name: str, *args: Any) -> None:
    """Call a function of libc. Raises OSError, with the function's name, when it fails."""
    if not hasattr(_LIBC, name):
        raise OSError(errno.ENOSYS, f"{name}: libc has no such function")
    if getattr(_LIBC, name)(*args) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def address(name: str) -> int:
    """Return where a function of libc lies in memory, which is where the kernel puts all that is mapped."""
    return ctypes.cast(getattr(_LIBC, name), ctypes.c_void_p).value or 0


def prctl(option: int, value: int) -> None:
    """Raises OSError."""
    call("prctl", option, ctypes.c_ulong(value), ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0))


def drop_capabilities() -> None:
    """Drop all capabilities, for good together with no_new_privs. Raises OSError."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    call("capset", header, (ctypes.c_uint32 * 6)())
