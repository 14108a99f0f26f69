"""A filter of system calls: computing goes on, everything else is refused by the kernel with an error.

An allow list, in classic BPF (seccomp(2)); without any library. Refused are new processes and programs, signals,
sockets, opening files for writing, and all that is not listed. Threads and reading files stay: threads as libc makes
them, which share all that the kernel keeps for a process, and mappings where it puts them, lest the tables of pages
outgrow the pages.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Sequence
from functools import cache

from .libc import PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, address, call, prctl

_SECCOMP_MODE_FILTER = 2
_ALLOW = 0x7FFF_0000
_ERRNO = 0x0005_0000
_LOAD, _EQUAL, _ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06  # BPF_LD|W|ABS, BPF_JMP|JEQ|K, BPF_JMP|JSET|K, BPF_RET|K
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENTS_AT = 0, 4, 16  # in struct seccomp_data

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_TMPFILE & ~os.O_DIRECTORY
_THREAD = (0x003D_0F00, 0x007D_0F00)  # flags of clone for one in glibc and in musl: memory, files and all else shared
_PAIR = ((1,), (1, 1 | os.O_CLOEXEC, 1 | os.O_NONBLOCK, 1 | os.O_CLOEXEC | os.O_NONBLOCK))  # AF_UNIX, SOCK_STREAM
_REMAP_FLAGS = (0, 1)  # in place or where the kernel likes
_IOCTL_COMMANDS = (0x5421, 0x5450, 0x5451)  # blocking or not, closed or not in a new program: of a descriptor alone
_FCNTL_COMMANDS = (0, 1, 2, 3, 4, 1030)  # duplicate, flags; not F_SETOWN, which sends signals

# Numbers on x86-64 and on 64-bit ARM, from the kernel's tables; None where there is no such call.
_ARCHITECTURES = {"x86_64": (0xC000_003E, 0), "aarch64": (0xC000_00B7, 1)}
_CALLS: dict[str, tuple[int | None, int | None]] = {
    "read": (0, 63),
    "write": (1, 64),
    "close": (3, 57),
    "stat": (4, None),
    "fstat": (5, 80),
    "lstat": (6, None),
    "poll": (7, None),
    "lseek": (8, 62),
    "mprotect": (10, 226),
    "munmap": (11, 215),
    "brk": (12, 214),
    "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139),
    "pread64": (17, 67),
    "readv": (19, 65),
    "writev": (20, 66),
    "access": (21, None),
    "pipe": (22, None),
    "select": (23, None),
    "sched_yield": (24, 124),
    "madvise": (28, 233),
    "dup": (32, 23),
    "dup2": (33, None),
    "pause": (34, None),
    "nanosleep": (35, 101),
    "getitimer": (36, 102),
    "alarm": (37, None),
    "setitimer": (38, 103),
    "getpid": (39, 172),
    "recvfrom": (45, 207),
    "shutdown": (48, 210),
    "getsockopt": (55, 209),
    "exit": (60, 93),
    "uname": (63, 160),
    "getcwd": (79, 17),
    "readlink": (89, None),
    "gettimeofday": (96, 169),
    "getrlimit": (97, 163),
    "getrusage": (98, 165),
    "sysinfo": (99, 179),
    "times": (100, 153),
    "getuid": (102, 174),
    "getgid": (104, 176),
    "geteuid": (107, 175),
    "getegid": (108, 177),
    "getppid": (110, 173),
    "rt_sigpending": (127, 136),
    "sigaltstack": (131, 132),
    "gettid": (186, 178),
    "time": (201, None),
    "futex": (202, 98),
    "sched_getaffinity": (204, 123),
    "getdents64": (217, 61),
    "clock_gettime": (228, 113),
    "clock_getres": (229, 114),
    "clock_nanosleep": (230, 115),
    "exit_group": (231, 94),
    "epoll_wait": (232, None),
    "epoll_ctl": (233, 21),
    "newfstatat": (262, 79),
    "readlinkat": (267, 78),
    "faccessat": (269, 48),
    "pselect6": (270, 72),
    "ppoll": (271, 73),
    "set_robust_list": (273, 99),
    "epoll_pwait": (281, 22),
    "eventfd2": (290, 19),
    "epoll_create1": (291, 20),
    "dup3": (292, 24),
    "pipe2": (293, 59),
    "preadv": (295, 69),
    "getrandom": (318, 278),
    "statx": (332, 291),
    "rseq": (334, 293),
    "faccessat2": (439, 439),
}
_OPEN, _OPENAT = (2, None), (257, 56)
_CLONE, _CLONE3 = (56, 220), (435, 435)
_MMAP, _MREMAP = (9, 222), (25, 216)
_FCNTL, _IOCTL = (72, 25), (16, 29)
_SENDTO, _PRLIMIT = (44, 206), (302, 261)
_SOCKETPAIR = (53, 199)  # what an event loop wakes itself with


def check() -> None:
    """Raises OSError where there can be no such filter."""
    if os.uname().machine not in _ARCHITECTURES:
        known = ", ".join(_ARCHITECTURES)
        raise OSError(errno.ENOSYS, f"no table of system calls for {os.uname().machine}; there are those for {known}")
    try:
        call("prctl", PR_SET_SECCOMP, ctypes.c_ulong(_SECCOMP_MODE_FILTER), None)
    except OSError as error:
        if error.errno != errno.EFAULT:  # a kernel that would read the filter
            raise


def install(*, memory_mb: int) -> None:
    """Put this process, and all threads to come, under the filter for good. Raises OSError."""
    install_program(compiled(memory_mb=memory_mb))


def compiled(*, memory_mb: int) -> bytes:
    """Return the filter of this process and its children, which map memory around the same address."""
    return _compiled(memory_mb // 2**12)


@cache
def _compiled(further: int) -> bytes:
    near = address("mmap") >> 32  # in parts of 4 GB
    return _program(*_ARCHITECTURES[os.uname().machine], mapped=range(near - 1 - further, near + 2))


def install_program(program: bytes) -> None:
    """Do the same with any filter."""
    buffer = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HP", len(program) // 8, ctypes.addressof(buffer))
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    call(
        "prctl", PR_SET_SECCOMP, ctypes.c_ulong(_SECCOMP_MODE_FILTER), ctypes.create_string_buffer(header, len(header))
    )


def _program(architecture: int, column: int, *, mapped: Sequence[int]) -> bytes:
    """Numbers of another architecture, 32-bit ones on the same kernel for instance, are refused as a whole."""
    parts = [
        _statement(_LOAD, _ARCHITECTURE_AT),
        _jump(_EQUAL, architecture, 1, 0),
        _refuse(),
        _statement(_LOAD, _NUMBER_AT),
    ]
    conditions = {
        _OPEN: _none_of(1, _WRITES, errno.EACCES),
        _OPENAT: _none_of(2, _WRITES, errno.EACCES),
        _CLONE: _one_of(0, _THREAD),
        _MMAP: _anywhere_or_within(0, mapped),
        _MREMAP: _one_of(3, _REMAP_FLAGS, errno.ENOMEM),
        _FCNTL: _one_of(1, _FCNTL_COMMANDS),
        _SENDTO: _one_of(4, (0,)),
        _PRLIMIT: _one_of(0, (0,)),
        _IOCTL: _one_of(1, _IOCTL_COMMANDS, errno.ENOTTY),
        _SOCKETPAIR: _one_of(0, _PAIR[0]) + _one_of(1, _PAIR[1]),
    }
    allow = _statement(_RETURN, _ALLOW)
    for numbers in _CALLS.values():
        parts += _case(numbers[column], [allow])
    for numbers, checks in conditions.items():
        parts += _case(numbers[column], [*checks, allow])
    parts += _case(_CLONE3[column], [_refuse(errno.ENOSYS)])  # libc then uses clone
    return b"".join([*parts, _refuse()])


def _case(number: int | None, body: list[bytes]) -> list[bytes]:
    """Return `body` for one system call, which it answers; other calls go on behind it."""
    return [] if number is None else [_jump(_EQUAL, number, 0, len(body)), *body]


# What refuses a call by one of its arguments, or goes on.


def _none_of(argument: int, bits: int, error: int) -> list[bytes]:
    return [_load(argument), _jump(_ANY_BIT, bits, 0, 1), _refuse(error)]


def _one_of(argument: int, values: Sequence[int], error: int = errno.EPERM) -> list[bytes]:
    """Return instructions that allow an argument these values only.

    It has 32 bits: the high half must be 0.
    """
    low = [_load(argument), *_jump_if_any(values, over=1)]
    return [_load(argument, high=True), _jump(_EQUAL, 0, 0, len(low)), *low, _refuse(error)]


def _anywhere_or_within(argument: int, high_halves: Sequence[int]) -> list[bytes]:
    """Allow an address that is 0, for the kernel to choose, or in one of these 4 GB parts: all memory is there."""
    is_zero = [_jump(_EQUAL, 0, 0, 2), _load(argument), _jump(_EQUAL, 0, 1, 0)]
    return [
        _load(argument, high=True),
        *_jump_if_any(high_halves, over=1 + len(is_zero)),
        *is_zero,
        _refuse(errno.ENOMEM),
    ]


def _jump_if_any(values: Sequence[int], *, over: int) -> list[bytes]:
    """Skip `over` statements behind these if what was loaded is one of the values."""
    return [_jump(_EQUAL, value, len(values) - 1 - index + over, 0) for index, value in enumerate(values)]


def _load(argument: int, *, high: bool = False) -> bytes:
    return _statement(_LOAD, _ARGUMENTS_AT + 8 * argument + 4 * high)  # both architectures are little-endian


def _refuse(error: int = errno.EPERM) -> bytes:
    return _statement(_RETURN, _ERRNO | error)


def _statement(code: int, value: int) -> bytes:
    return struct.pack("HBBI", code, 0, 0, value)


def _jump(code: int, value: int, if_true: int, if_false: int) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, value)
