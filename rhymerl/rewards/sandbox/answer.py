"""The process of an answer: it has the code and nothing of the tests, neither in memory nor in a descriptor."""

from __future__ import annotations

import os
import sys
from typing import Any

from .children import NoProcessError, confine, fork, keep_only
from .remote import EVERYTHING, Peer
from .wire import read_message, write_message

_REQUESTS, _REPLIES = 3, 4
_MAX_MESSAGE_BYTES = 2**26
_MAX_OUTPUT_BYTES = 2**20  # of a program
EXITS = {"exit": sys.exit, "quit": sys.exit}  # builtins of the `site` module, which is not loaded


def start(job: dict[str, Any], *, null_fd: int, filtered: bool) -> tuple[int, int]:
    """Return descriptors for its replies and for requests; the process ends once the latter is closed."""
    requests_fd, requests = os.pipe()
    replies, replies_fd = os.pipe()

    def work() -> None:
        keep_only([null_fd, null_fd, null_fd, requests_fd, replies_fd])
        if job["is_program"]:
            _run_programs(job, filtered=filtered)
        else:
            confine(job, filtered=filtered)
            _offer_functions(job["code"])

    fork(work)
    os.close(requests_fd)
    os.close(replies_fd)
    return replies, requests


def _offer_functions(code: str) -> None:
    """Run the code on request, and let its functions be called; object 0 maps names to values."""
    names: dict[str, Any] = {"__name__": "answer", **EXITS}

    def load(wanted: list[str]) -> dict[str, Any]:
        exec(compile(code, "answer.py", "exec"), names)
        return {name: names[name] for name in wanted if name in names}

    peer = Peer(_REQUESTS, _REPLIES, operations=EVERYTHING)
    peer.export(load)
    peer.serve()


def _run_programs(job: dict[str, Any], *, filtered: bool) -> None:
    """Run the code in a process of its own for each input asked for; reply with its output and exit code."""
    while True:
        try:
            given = read_message(_REQUESTS, max_bytes=_MAX_MESSAGE_BYTES)
        except EOFError:
            return
        try:
            reply = _run_program(job, given, filtered=filtered)
        except NoProcessError as error:
            reply = {"unavailable": str(error)}
        write_message(_REPLIES, reply)


def _run_program(job: dict[str, Any], given: str, *, filtered: bool) -> dict[str, Any]:
    source = os.memfd_create("input")
    with open(source, "wb", closefd=False) as file:
        file.write(given.encode())
    os.lseek(source, 0, os.SEEK_SET)
    output_fd, written_fd = os.pipe()

    def work() -> None:
        keep_only([source, written_fd, 2])
        confine(job, filtered=filtered)
        _be_program(job["code"])

    child = fork(work)
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
