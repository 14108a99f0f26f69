"""The process that has the tests; of the answer's process it trusts no claim, only values that are right."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterator
from functools import partial
from types import CodeType
from typing import Any

from . import answer, seccomp
from .children import NoProcessError, limit
from .handover import TESTS_FILE
from .remote import CALLS, Caught, Peer, Remote
from .wire import BrokenMessageError, encode, read_message, write_message

_MAX_TESTS_BYTES = 2**30
_MAX_WORDS = 300  # characters
_OWN = {*vars(builtins), *answer.EXITS, "__builtins__"}  # names that the tests have from Python


def examine(job: dict[str, Any], *, job_fd: int, report_fd: int, null_fd: int, filtered: bool) -> None:
    """Report each test that passed, and what the first failure was. Raises NoProcessError."""
    replies, requests = answer.start(job, null_fd=null_fd, filtered=filtered)
    limit(job)
    tests = read_message(job_fd, max_bytes=_MAX_TESTS_BYTES)  # not before: the answer's process would have them too
    peer = Peer(replies, requests, operations=CALLS)
    offered = Remote(peer, 0)
    if job["is_program"]:
        trials: Iterator[Callable[[], dict[str, Any]]] = (partial(_try_program, test, offered) for test in tests)
    else:
        if filtered:
            seccomp.install(memory_mb=job["memory_mb"])
        trials = _function_trials(tests, job["entry_point"], offered)
    for trial in trials:
        outcome = {}
        with Caught() as caught:
            outcome = trial()
        if isinstance(caught.error, NoProcessError):
            raise caught.error
        if peer.unfit is not None:
            write_message(report_fd, {"unfit": str(peer.unfit)})
            return
        if caught.error is None:
            write_message(report_fd, {"passed": 1, **outcome})
            continue
        write_message(report_fd, {"failure": _words(caught.error)[:_MAX_WORDS]})
        if job["stops_at_failure"]:
            return


def _words(error: BaseException) -> str:
    """The answer has a say in them, where the tests' own message has an object of the answer in it."""
    name = type(error).__name__
    with Caught():
        return f"{name}: {error}".rstrip(": ")
    return name


def _try_program(test: dict[str, Any], run: Any) -> dict[str, Any]:
    reply = run(test["input"])
    if "unavailable" in reply:
        raise NoProcessError(reply["unavailable"])
    assert reply["output"] is not None, "too much output"
    assert reply["code"] == 0, f"exit code {reply['code']}"
    assert _lines(reply["output"]) == _lines(test["output"]), "another output"
    return {}


def _lines(text: str) -> list[str]:
    """Return the lines without white space at their ends and without empty lines at the end."""
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _function_trials(tests: list[Any], entry_point: str | None, load: Any) -> Iterator[Callable[[], dict[str, Any]]]:
    """The answer's code runs within the first trial, and where it raised, within the next again."""
    compiled = [compile(test if isinstance(test, str) else "", TESTS_FILE, "exec") for test in tests]
    # A builtin is taken from the answer only as the entry point: else its own `sorted` could make right of wrong.
    used = {name for source in compiled for name in _names(source)} - (_OWN - {entry_point})
    wanted = used | (_names(compile(entry_point, "entry_point", "eval")) if entry_point else set())
    offered: dict[str, Any] = {}

    def trial(test: Any, source: CodeType) -> dict[str, Any]:
        if not offered:
            offered.update(_asked_for(load(sorted(wanted)), wanted), __name__="answer")
        if isinstance(test, str):
            names = {name: offered[name] for name in used if name in offered}
            _run_tests(source, {**answer.EXITS, **names, "__name__": "tests"}, entry_point, offered)
            return {}
        value = eval(str(entry_point), offered)(*test["input"])
        if "output" not in test:
            return {"value": encode(value, _refuse)}
        assert _as_lists(value) == test["output"], "another value"
        return {}

    return (partial(trial, test, source) for test, source in zip(tests, compiled, strict=True))


def _asked_for(offered: Any, wanted: set[str]) -> dict[str, Any]:
    """Return only the wanted names of what the answer's process offers: others would replace the tests' own names."""
    if not isinstance(offered, dict):
        raise BrokenMessageError("not names and what they stand for")
    return {name: offered[name] for name in wanted - {"__builtins__"} if name in offered}


def _names(code: CodeType) -> set[str]:
    """Return all global names that the code reads or writes."""
    inner = [constant for constant in code.co_consts if isinstance(constant, type(code))]
    return {*code.co_names}.union(*map(_names, inner))


def _run_tests(code: CodeType, names: dict[str, Any], entry_point: str | None, offered: dict[str, Any]) -> None:
    """Run the tests, which may define `check(candidate)`, as in HumanEval.

    It then gets the entry point: the answer's, not one of the tests.
    """
    exec(code, names)
    if entry_point and "check" in code.co_names and callable(names.get("check")):
        names["check"](eval(entry_point, offered))


def _refuse(value: Any) -> Any:
    raise TypeError("no plain value")


def _as_lists(value: Any) -> Any:
    """Return a value as JSON would have it, in which the expected value was written."""
    if isinstance(value, list | tuple):
        return [_as_lists(item) for item in value]
    return {str(key): _as_lists(item) for key, item in value.items()} if isinstance(value, dict) else value
