"""Code among the answer, tried with tests in a sandbox."""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from textwrap import dedent
from typing import TYPE_CHECKING, Any

from rhymerl.rewards.arguments import check_argument
from rhymerl.rewards.hooks import brings
from rhymerl.rewards.walls import check_sandbox

if TYPE_CHECKING:
    from rhymerl.rewards.base import Reward
    from rhymerl.rewards.sandbox.run import Sandbox, Wall

_FENCE = re.compile(r"([^`]*)(`{3,})([^`]*)")
_PYTHON = ("python", "python3", "py")
_LIST_MARKS = " \t-*+>0123456789.)"  # before a fence in a list or a quotation
_MIN_MEMORY_MB = 64  # Python itself starts in 16, and imports most of its library in this


def check_code(reward: Reward) -> None:
    """Raise ConfigError if no answer can pass, or if this machine lacks a wall that the settings do not waive."""
    for name in ("partial", "packages"):
        check_argument(reward, name, lambda value: isinstance(value, bool), "true or false")
    check_argument(reward, "entry_point", _is_expression, "an expression of Python, such as add or Solution().add")
    check_sandbox(reward, time_limit_s=5.0, min_memory_mb=_MIN_MEMORY_MB)


def _is_expression(value: object) -> bool:
    if not isinstance(value, str):
        return value is None
    try:
        compile(value, "entry_point", "eval")
    except (SyntaxError, ValueError):
        return False
    return True


def open_sandbox(arguments: Mapping[str, Any]) -> Sandbox:
    """Return the sandbox that runs all answers."""
    from rhymerl.rewards.sandbox.run import Sandbox

    return Sandbox()


@brings(check=check_code, opens={"sandbox": open_sandbox})
def code(
    completion: str,
    *,
    tests: Any,
    entry_point: str | None = None,
    partial: bool = False,
    time_limit_s: float = 5.0,
    memory_mb: int = 512,
    packages: bool = False,
    unsafe_without: Sequence[Wall] = (),
    sandbox: Sandbox | None = None,
) -> float:
    """Return 1.0 when the completion's code passes all its `tests`, else 0.0; with `partial` the share that it passes.

    The code is `last_code_block`. `tests` are Python source with assertions or a list of such; or a list of `{"input":
    ..., "output": ...}`: with an `entry_point`, an expression such as `Solution().add`, these are its arguments (a
    list) and the value it is to return, without one what the code as a program reads and writes. Source that defines
    `check(candidate)` gets the entry point passed. `packages` lets the code import what is installed here.

    All tests together take at most `time_limit_s`. The code runs in a sandbox of `rhymerl.rewards.sandbox`; without
    `sandbox` in one that is warmed up for this call alone. Raises ValueError or SyntaxError for tests of another form,
    or by which no answer can be judged, and SandboxError where no sandbox can be had.
    """
    from rhymerl.rewards.sandbox.run import Job, run

    tests = [tests] if isinstance(tests, str) else list(tests)
    _check_tests(tests, entry_point)
    job = Job(
        code=last_code_block(completion),
        tests=tests,
        entry_point=entry_point,
        is_program=entry_point is None and isinstance(tests[0], dict),
        stops_at_failure=not partial,
        time_limit_s=time_limit_s,
        memory_mb=memory_mb,
        folders=sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}) if packages else (),
        unsafe_without=unsafe_without,
    )
    report = run(job) if sandbox is None else sandbox.run(job)
    if report.unfit:
        raise ValueError(f"tests: {report.unfit}")
    return report.passed / len(tests) if partial else float(report.passed == len(tests))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fence:
    """A line that may open or close a block."""

    line: int
    before: str
    num_ticks: int
    language: str

    @property
    def opens(self) -> bool:
        return self.language in _PYTHON or not self.before.strip(_LIST_MARKS)

    def closes(self, block: _Fence) -> bool:
        """Return whether it ends a block; one that is indented further is within it, as in a docstring."""
        indent = len(block.before) - len(block.before.lstrip())
        is_bare = not self.before.strip() and not self.language
        return is_bare and self.num_ticks >= block.num_ticks and len(self.before) < indent + 4


def last_code_block(text: str) -> str:
    """Return the program in `text`: the last Python block fenced by ```, else the last without a language, else all.

    The last block may lack its end, and a program that the prompt has opened ends at the first fence. Common
    indentation goes.
    """
    lines = text.replace("\r\n", "\n").split("\n")
    programs: dict[bool, str] = {}  # the last block by whether it is marked as Python

    def keep(block: _Fence, content: list[str]) -> None:
        program = dedent("\n".join(content))
        if program.strip() and block.language in ("", *_PYTHON):
            programs[bool(block.language)] = program

    block: _Fence | None = None
    first_bare: int | None = None  # line of the first fence without a language
    is_opened_before = False
    for fence in _fences(lines):
        if block is not None and fence.closes(block):
            keep(block, [*lines[block.line + 1 : fence.line], ""])
            block = None
        elif fence.opens and (block is None or (fence.language and not block.language)):
            is_opened_before = is_opened_before or block is not None
            first_bare = fence.line if first_bare is None and not fence.language else first_bare
            block = fence
    if block is not None:
        is_opened_before = is_opened_before or not block.language
        keep(block, lines[block.line + 1 :])
    before = "\n".join([*lines[:first_bare], ""])
    is_announced = before.rstrip().endswith(":")  # by which no program ends
    if is_opened_before and not programs.get(True) and before.strip() and not is_announced:
        return dedent(before)
    return programs.get(True) or programs.get(False) or text


def _fences(lines: Sequence[str]) -> Iterator[_Fence]:
    for number, line in enumerate(lines):
        if (found := _FENCE.fullmatch(line)) is not None:
            language = found[3].strip().partition(" ")[0].strip("{}.").lower()
            yield _Fence(line=number, before=found[1], num_ticks=len(found[2]), language=language)


def _check_tests(tests: list[Any], entry_point: str | None) -> None:
    if not tests:
        raise ValueError("tests: expected at least one")
    kind = type(tests[0])
    if entry_point is not None:
        compile(entry_point, "entry_point", "eval")
    for test in tests:
        is_pair = isinstance(test, dict) and "input" in test and "output" in test
        if type(test) is not kind or not (isinstance(test, str) or is_pair):
            raise ValueError(f"tests: {test!r:.80}: expected Python source, or all as {{'input': ..., 'output': ...}}")
        if isinstance(test, str):
            compile(test, "tests", "exec")
        elif not isinstance(test["input"], str if entry_point is None else list):
            raise ValueError(f"tests: input={test['input']!r:.80}: expected text, or with an entry_point a list")
