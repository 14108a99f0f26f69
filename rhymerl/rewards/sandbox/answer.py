"""The process of an answer: it has the code and nothing of the tests, neither in memory nor in a descriptor."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from .children import NoProcessError, confine, fork, keep_only
from .remote import EVERYTHING, Peer

_REQUESTS, _REPLIES = 3, 4
_MAX_OUTPUT_BYTES = 2**20  # of a program
EXITS = {"exit": sys.exit, "quit": sys.exit}  # builtins of the `site` module, which is not loaded


def start(job: dict[str, Any], *, null_fd: int, filtered: bool) -> tuple[int, int]:
    """Return descriptors for its replies and for requests; the process ends once the latter is closed."""
    requests_fd, requests = os.pipe()
    replies, replies_fd = os.pipe()

    def work() -> None:
        keep_only([null_fd, null_fd, null_fd, requests_fd, replies_fd])
        if job["is_program"]:
            _offer(partial(_run_program, job, filtered=filtered))
        else:
            confine(job, filtered=filtered)
            _offer(partial(_load, job["code"], {"__name__": "answer", **EXITS}))

    fork(work)
    os.close(requests_fd)
    os.close(replies_fd)
    return replies, requests


def _offer(function: Callable[..., Any]) -> None:
    """Let this function be called, and what it returns: it is object 0."""
    peer = Peer(_REQUESTS, _REPLIES, operations=EVERYTHING)
    peer.export(function)
    peer.serve()


def _load(code: str, names: dict[str, Any], wanted: list[str]) -> dict[str, Any]:
    """Run the code, and return its functions."""
    exec(compile(code, "answer.py", "exec"), names)
    return {name: names[name] for name in wanted if name in names}


def _run_program(job: dict[str, Any], given: str, *, filtered: bool) -> dict[str, Any]:
    """Run the code in a process of its own. Returns its output and exit code, or why there is no process."""
    source = os.memfd_create("input")
    with open(source, "wb", closefd=False) as file:
        file.write(given.encode())
    os.lseek(source, 0, os.SEEK_SET)
    output_fd, written_fd = os.pipe()

    def work() -> None:
        keep_only([source, written_fd, 2])
        confine(job, filtered=filtered)
        _be_program(job["code"])

    try:
        child = fork(work)
    except NoProcessError as error:
        return {"unavailable": str(error)}
    finally:
        os.close(source)
        os.close(written_fd)
    with open(output_fd, "rb") as pipe:  # once it is closed, a program that goes on writing ends by SIGPIPE
        output = pipe.read(_MAX_OUTPUT_BYTES + 1)
    text = output.decode(errors="replace") if len(output) <= _MAX_OUTPUT_BYTES else None
    _, status = os.waitpid(child, 0)
    return {"output": text, "code": os.waitstatus_to_exitcode(status)}


def _be_program(code: str) -> None:
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - the code may close descriptor 0 itself
    with open(1, "w", encoding="utf-8") as sys.stdout:
        exec(compile(code, "answer.py", "exec"), {"__name__": "__main__", **EXITS})
