"""A user whose processes the kernel counts: it counts them per user namespace, and never root's."""

from __future__ import annotations

import errno
import os
import re
import resource
from collections.abc import Sequence
from typing import NamedTuple

MAX_PROCESSES = 64  # of an answer, threads included
_COUNTED_APART = (5, 14)  # Linux since when a user namespace counts by itself


class User(NamedTuple):
    """A user and a group by number."""

    uid: int
    gid: int


def own() -> User:
    """Return the user that this process is."""
    return User(os.geteuid(), os.getegid())


def spare() -> User | None:
    """Return a user that nobody is, another for each process; None unless this process is root, or with root alone."""
    uid, gid = (_spare_id(f"/proc/self/{name}") for name in ("uid_map", "gid_map"))
    return None if os.geteuid() != 0 or uid is None or gid is None else User(uid, gid)


def check(user: User, *, folders: Sequence[str], apart: bool) -> None:
    """Raise OSError if this process cannot be `user`.

    Also if the user cannot read `folders`, or other processes count as the user's. `apart` says whether there is a user
    namespace around it.
    """
    if user == own():
        if not apart:
            raise OSError(errno.EPERM, "all processes of a user count together outside of namespaces")
        if tuple(int(part) for part in re.findall(r"\d+", os.uname().release)[:2]) < _COUNTED_APART:
            raise OSError(errno.ENOSYS, "this kernel counts a user's processes over all namespaces")
        return
    before = os.geteuid()
    os.seteuid(user.uid)
    try:
        for path in (os.__file__, *folders):
            if not os.access(path, os.R_OK, effective_ids=True):
                raise OSError(errno.EACCES, f"nobody but root can read {path}")
    finally:
        os.seteuid(before)


def become(user: User) -> None:
    """Become the user for good, once the capabilities are dropped too. Raises OSError."""
    if user == own():
        return
    os.setgroups([])
    os.setresgid(user.gid, user.gid, user.gid)
    os.setresuid(user.uid, user.uid, user.uid)


def limit_processes() -> None:
    """Limit the processes of this process's user, for good. Raises OSError where the kernel does not count them."""
    resource.setrlimit(resource.RLIMIT_NPROC, (1, MAX_PROCESSES))
    try:
        child = os.fork()
    except OSError:
        resource.setrlimit(resource.RLIMIT_NPROC, (MAX_PROCESSES, MAX_PROCESSES))
        return
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    raise OSError(errno.EPERM, "the kernel does not count root's processes")


def _spare_id(path: str) -> int | None:
    """Return an id in the upper half of the widest range that is mapped here."""
    with open(path) as file:
        ranges = [[int(word) for word in line.split()] for line in file]
    first, _, count = max(ranges, key=lambda entry: entry[2], default=(0, 0, 0))
    return first + count // 2 + os.getpid() % (count // 4) if count >= 4 else None
