"""Tries every attack on a machine that offers less than this one: `python machines.py KIND FOLDER PORT`.

Prints one JSON object: what the machine lacks, how a run is refused on it, and by attack how many tests passed and what failed.
"""

from __future__ import annotations

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
from rhymerl.rewards.sandbox.run import WALLS, Job, Report, missing_walls, run
from tests.rewards.hostile import FORGERIES, FUNCTIONS, PROGRAMS, SECRET, Attack

NOBODY = 65534
NEW_USER = 0x1000_0000
TIME_LIMIT_S = 1.0


def whole() -> None:
    """Whoever runs the tests, often root."""


def ordinary_user() -> None:
    """No right to anything."""
    if os.getuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)


def without_namespaces() -> None:
    """As in a container of Docker: root without rights, who may not make namespaces."""
    user = os.getuid()
    libc.call("unshare", NEW_USER)
    Path("/proc/self/uid_map").write_text(f"0 {user} 1")
    Path("/proc/sys/user/max_user_namespaces").write_text("0")
    libc.prctl(libc.PR_SET_NO_NEW_PRIVS, 1)
    libc.drop_capabilities()


def without_seccomp() -> None:
    """A filter that refuses further ones."""
    libc.prctl(libc.PR_SET_NO_NEW_PRIVS, 1)
    _, column = seccomp._ARCHITECTURES[os.uname().machine]
    number = (157, 167)[column]  # prctl
    refused = seccomp._statement(seccomp._RETURN, seccomp._ERRNO | errno.EINVAL)
    allowed = seccomp._statement(seccomp._RETURN, seccomp._ALLOW)
    parts = [
        seccomp._statement(seccomp._LOAD, seccomp._NUMBER_AT),
        seccomp._jump(seccomp._EQUAL, number, 0, 3),
        seccomp._statement(seccomp._LOAD, seccomp._ARGUMENTS_AT),
        seccomp._jump(seccomp._EQUAL, libc.PR_SET_SECCOMP, 0, 1),
        refused,
        allowed,
    ]
    seccomp.install_program(b"".join(parts))


KINDS = {
    "whole": whole,
    "ordinary_user": ordinary_user,
    "without_namespaces": without_namespaces,
    "without_seccomp": without_seccomp,
}


def attempt(attack: Attack, folder: str, port: str) -> Report:
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
    return run(
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
    """What a run says before it starts, if it does not accept what this machine lacks."""
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
    with ThreadPoolExecutor(4) as pool:
        reports = pool.map(lambda attack: attempt(attack, folder, port), attacks.values())
        found = {name: [report.passed, report.failure] for name, report in zip(attacks, reports, strict=True)}
    print(json.dumps({"missing": missing, "refusal": refusal(), "found": found}))


if __name__ == "__main__":
    main(*sys.argv[1:])
