"""Tries every attack on a machine that offers less than this one: `python machines.py KIND FOLDER PORT`.

Prints one JSON object: what the machine lacks, how a run is refused on it, and by attack how many tests passed and what
failed.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from rhymerl.errors import ConfigError
from rhymerl.rewards import Reward
from rhymerl.rewards.programs import check_code
from rhymerl.rewards.sandbox import libc, seccomp
from rhymerl.rewards.sandbox.run import WALLS, Job, JobResult, Sandbox, missing_walls
from tests.rewards.hostile import FORGERIES, FUNCTIONS, PROGRAMS, SECRET, Attack

NOBODY = 65534
NEW_USER = 0x1000_0000
TIME_LIMIT_S = 1.0


def whole() -> None:
    """Stay the user who runs the tests, often root."""


def ordinary_user() -> None:
    """Give up all rights."""
    if os.getuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)


def container() -> None:
    """Become root as in a container of Docker's: with some rights, but none to make namespaces."""
    numbers = {"x86_64": 272, "aarch64": 97}  # unshare
    _refuse(numbers[os.uname().machine])
    header = (ctypes.c_uint32 * 2)(0x2008_0522, 0)
    rights = sum(1 << capability for capability in (0, 1, 3, 4, 5, 6, 7, 8, 10, 13, 18, 27, 29, 31))
    libc.call("capset", header, (ctypes.c_uint32 * 6)(rights, rights, 0))


def without_namespaces() -> None:
    """Root in name only, who may not even become somebody else."""
    user = os.getuid()
    libc.call("unshare", NEW_USER)
    Path("/proc/self/uid_map").write_text(f"0 {user} 1")
    Path("/proc/sys/user/max_user_namespaces").write_text("0")
    libc.prctl(libc.PR_SET_NO_NEW_PRIVS, 1)
    libc.drop_capabilities()


def without_seccomp() -> None:
    """A filter that refuses further ones."""
    numbers = {"x86_64": 157, "aarch64": 167}  # prctl
    _refuse(numbers[os.uname().machine], first_argument=libc.PR_SET_SECCOMP)


def _refuse(number: int, *, first_argument: int | None = None) -> None:
    """A system call, or it with this argument."""
    refused = seccomp._statement(seccomp._RETURN, seccomp._ERRNO | errno.EPERM)
    body = [refused]
    if first_argument is not None:
        body = [seccomp._load(0), seccomp._jump(seccomp._EQUAL, first_argument, 0, 1), refused]
    allowed = seccomp._statement(seccomp._RETURN, seccomp._ALLOW)
    load = seccomp._statement(seccomp._LOAD, seccomp._NUMBER_AT)
    seccomp.install_program(b"".join([load, *seccomp._case(number, body), allowed]))


KINDS = {
    "whole": whole,
    "ordinary_user": ordinary_user,
    "container": container,
    "without_namespaces": without_namespaces,
    "without_seccomp": without_seccomp,
}


def attempt(sandbox: Sandbox, attack: Attack, folder: str, port: str) -> JobResult:
    names = {
        "FOLDER": folder,
        "TEMPORARY": tempfile.gettempdir(),
        "HOME": os.path.expanduser("~"),
        "SECRET": SECRET,
        "CALLER": str(os.getpid()),
        "PORT": port,
    }
    code, test = attack.code, attack.test
    for name, value in names.items():
        code, test = code.replace(name, value), test.replace(name, value)
    expected = "needle-7351" if "needle" in code else "1"
    return sandbox.run(
        Job(
            code=code,
            tests=[{"input": "1", "output": expected}] if attack.program else [test],
            is_program=attack.program,
            entry_point=attack.entry_point,
            time_limit_s=TIME_LIMIT_S,
            unsafe_without=WALLS,
        )
    )


def refusal() -> str:
    """Return what a run says before it starts, if it does not accept what this machine lacks."""
    try:
        check_code(Reward("rhymerl.rewards.code"))
    except ConfigError as error:
        return str(error)
    return ""


def main(kind: str, folder: str, port: str) -> None:
    KINDS[kind]()
    missing = dict(missing_walls())
    programs = {f"program: {name}": attack for name, attack in PROGRAMS.items()}
    attacks = {
        name: attack
        for name, attack in {**FUNCTIONS, **FORGERIES, **programs}.items()
        if not {*attack.needs} & {*missing}
    }
    with Sandbox() as sandbox, ThreadPoolExecutor(4) as pool:
        reports = pool.map(lambda attack: attempt(sandbox, attack, folder, port), attacks.values())
        found = {
            name: [report.passed, report.failure or report.unfit] for name, report in zip(attacks, reports, strict=True)
        }
    print(json.dumps({"missing": missing, "refusal": refusal(), "found": found}))


if __name__ == "__main__":
    main(*sys.argv[1:])
