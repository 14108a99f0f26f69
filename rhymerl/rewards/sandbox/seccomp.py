"""A filter of system calls: computing goes on, everything else is refused by the kernel with an error.

An allow list, in classic BPF (seccomp(2)); without any library. Refused are new processes and programs, signals, sockets,
opening files for writing, and all that is not listed. Threads and reading files stay.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct

from .libc import PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, call, prctl

_SECCOMP_MODE_FILTER = 2
_ALLOW = 0x7FFF_0000
_ERRNO = 0x0005_0000
_LOAD, _EQUAL, _ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06  # BPF_LD|W|ABS, BPF_JMP|JEQ|K, BPF_JMP|JSET|K, BPF_RET|K
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENTS_AT = 0, 4, 16  # in struct seccomp_data

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_TMPFILE & ~os.O_DIRECTORY
_CLONE_THREAD = 0x0001_0000
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
    "mmap": (9, 222),
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
    "mremap": (25, 216),
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
    "socketpair": (53, 199),  # what an event loop wakes itself with
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
_FCNTL, _IOCTL = (72, 25), (16, 29)
_SENDTO, _PRLIMIT = (44, 206), (302, 261)


class Condition:
    """Of an argument of a system call: any of `bits` set, or equal to one of `values` (both 32 bits, the high half is 0)."""

    def __init__(self, argument: int, *, bits: int | None = None, values: tuple[int, ...] = ()) -> None:
        self.argument = argument
        self.bits = bits
        self.values = values


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


def install() -> None:
    """Put this process, and all threads to come, under the filter for good. Raises OSError."""
    install_program(_program(*_ARCHITECTURES[os.uname().machine]))


def install_program(program: bytes) -> None:
    """The same with any filter."""
    buffer = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HP", len(program) // 8, ctypes.addressof(buffer))
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    call(
        "prctl", PR_SET_SECCOMP, ctypes.c_ulong(_SECCOMP_MODE_FILTER), ctypes.create_string_buffer(header, len(header))
    )


def _program(architecture: int, column: int) -> bytes:
    """Numbers of another architecture, 32-bit ones on the same kernel for instance, are refused as a whole."""
    refused = _statement(_RETURN, _ERRNO | errno.EPERM)
    parts = [
        _statement(_LOAD, _ARCHITECTURE_AT),
        _jump(_EQUAL, architecture, 1, 0),
        refused,
        _statement(_LOAD, _NUMBER_AT),
    ]
    for numbers in _CALLS.values():
        parts += _case(numbers[column], [_statement(_RETURN, _ALLOW)])
    parts += _case(_OPEN[column], _unless(Condition(1, bits=_WRITES), errno.EACCES))
    parts += _case(_OPENAT[column], _unless(Condition(2, bits=_WRITES), errno.EACCES))
    parts += _case(_CLONE[column], _if(Condition(0, bits=_CLONE_THREAD)))
    parts += _case(_FCNTL[column], _if(Condition(1, values=_FCNTL_COMMANDS)))
    parts += _case(_SENDTO[column], _if(Condition(4, values=(0,))))
    parts += _case(_PRLIMIT[column], _if(Condition(0, values=(0,))))
    parts += _case(_IOCTL[column], _if(Condition(1, values=_IOCTL_COMMANDS), errno.ENOTTY))
    parts += _case(_CLONE3[column], [_statement(_RETURN, _ERRNO | errno.ENOSYS)])  # libc then uses clone
    return b"".join([*parts, refused])


def _case(number: int | None, body: list[bytes]) -> list[bytes]:
    """`body`, which returns, for one system call; goes on behind it for all others."""
    return [] if number is None else [_jump(_EQUAL, number, 0, len(body)), *body]


def _if(condition: Condition, error: int = errno.EPERM) -> list[bytes]:
    return _branch(condition, then=_ALLOW, otherwise=_ERRNO | error)


def _unless(condition: Condition, error: int) -> list[bytes]:
    return _branch(condition, then=_ERRNO | error, otherwise=_ALLOW)


def _branch(condition: Condition, *, then: int, otherwise: int) -> list[bytes]:
    low = _ARGUMENTS_AT + 8 * condition.argument  # both architectures are little-endian
    if condition.bits is not None:
        tests = [_jump(_ANY_BIT, condition.bits, 1, 0)]
    else:
        last = len(condition.values)
        tests = [_jump(_EQUAL, value, last - place, 0) for place, value in enumerate(condition.values)]
    high = [] if condition.bits is not None else [_statement(_LOAD, low + 4), _jump(_EQUAL, 0, 0, 1 + len(tests))]
    return [*high, _statement(_LOAD, low), *tests, _statement(_RETURN, otherwise), _statement(_RETURN, then)]


def _statement(code: int, value: int) -> bytes:
    return struct.pack("HBBI", code, 0, 0, value)


def _jump(code: int, value: int, if_true: int, if_false: int) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, value)
