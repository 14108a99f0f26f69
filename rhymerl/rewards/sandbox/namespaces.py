"""A machine of its own: no network, no other processes, and only Python's library files, read-only."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence

from . import users
from .children import fork
from .libc import call

_NEW_USER = 0x1000_0000
_NEW_OTHERS = 0x0002_0000 | 0x0400_0000 | 0x0800_0000 | 0x2000_0000 | 0x4000_0000  # mount, UTS, IPC, PID, network
_READ_ONLY, _NO_SUID, _NO_DEVICES, _NO_EXEC = 1, 2, 4, 8
_NO_ATIME, _NO_DIR_ATIME, _RELATIVE_ATIME = 1024, 2048, 1 << 21
_REMOUNT, _BIND, _RECURSIVE, _PRIVATE = 32, 4096, 16384, 1 << 18
_DETACH = 2
_KEPT = {  # what may not be taken away in remounting, by its flag in statvfs
    os.ST_NOEXEC: _NO_EXEC,
    os.ST_NOATIME: _NO_ATIME,
    os.ST_NODIRATIME: _NO_DIR_ATIME,
    os.ST_RELATIME: _RELATIVE_ATIME,
}
_ROOT = "/proc"  # where the new root is built: it is on every machine, and nothing that is needed lies in it
_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64")


def enter(folders: Sequence[str], *, spare: users.User | None) -> None:
    """Move this process into new namespaces in which only `folders` and the libraries can be read.

    Future children are in the new PID namespace. `spare` is a user that they can become, if this process may map one.
    Raises OSError.
    """
    _unshare(spare)
    call("mount", b"none", b"/", None, _RECURSIVE | _PRIVATE, None)
    call("mount", b"tmpfs", _ROOT.encode(), b"tmpfs", _NO_SUID | _NO_DEVICES | _NO_EXEC, b"size=1m,mode=755")
    standard = os.path.dirname(os.path.dirname(os.__file__))
    for folder in sorted({standard, *_LIBRARIES, *folders}):
        _show(folder)
    os.chdir(_ROOT)
    call("pivot_root", b".", b".")
    call("umount2", b".", _DETACH)
    call("mount", None, b"/", None, _REMOUNT | _BIND | _READ_ONLY | _NO_SUID | _NO_DEVICES | _NO_EXEC, None)
    os.chdir("/")


def _unshare(spare: users.User | None) -> None:
    """Enter new namespaces, with a user namespace, for which nobody needs a right.

    Where user namespaces are switched off, root enters the others without one.
    """
    own = users.own()
    finish = _map_from_outside([own, spare]) if spare else lambda entered: False
    try:
        call("unshare", _NEW_USER | _NEW_OTHERS)
    except OSError:
        finish(False)
        if own.uid != 0:
            raise
        call("unshare", _NEW_OTHERS)
        return
    if not finish(True):
        with open("/proc/self/setgroups", "w") as file:
            file.write("deny")
        _map(os.getpid(), [own])


def _map_from_outside(kept: Sequence[users.User]) -> Callable[[bool], bool]:
    """Have a child, which stays outside, map more users than this process's own, as only root may, once it is told to.

    Returns how to tell it whether there is a namespace, which returns whether it has mapped them.
    """
    process = os.getpid()
    told, tell = os.pipe()

    def work() -> None:
        os.close(tell)
        if not os.read(told, 1):
            raise SystemExit(1)
        _map(process, kept)

    child = fork(work)
    os.close(told)

    def finish(entered: bool) -> bool:
        if entered:
            os.write(tell, b"1")
        os.close(tell)
        return os.waitpid(child, 0)[1] == 0

    return finish


def _map(process: int, kept: Sequence[users.User]) -> None:
    """Map these users and groups under their own numbers. Raises OSError."""
    for kind in ("uid", "gid"):
        with open(f"/proc/{process}/{kind}_map", "w") as file:
            file.write("\n".join(f"{getattr(user, kind)} {getattr(user, kind)} 1" for user in kept))


def _show(folder: str) -> None:
    target = _ROOT + folder
    if os.path.islink(folder):
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.symlink(os.readlink(folder), target)
        return
    if not os.path.isdir(folder) or os.path.isdir(target):  # none, or within another one
        return
    os.makedirs(target)
    call("mount", folder.encode(), target.encode(), None, _BIND | _RECURSIVE, None)
    flags = os.statvfs(target).f_flag
    kept = sum(mount_flag for flag, mount_flag in _KEPT.items() if flags & flag)
    remounted = _REMOUNT | _BIND | _READ_ONLY | _NO_SUID | _NO_DEVICES | kept
    try:
        call("mount", None, target.encode(), None, remounted, None)
    except OSError as error:
        raise OSError(error.errno or errno.EPERM, f"read-only {folder}: {error.strerror}") from error
