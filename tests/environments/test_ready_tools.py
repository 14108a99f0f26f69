"""The calculator, the answer and the notebook."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from rhymerl import ConfigError
from rhymerl.environments import Environment, Python, Reply, Tools, Turn, answer, calculator
from rhymerl.environments.ready import missing_walls


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("47 + 85", "132"),
        (" (12.5 + 3) * 2 ", "31"),
        ("2 + 3 * 4 - -1", "15"),
        ("2 ** 3 ** 2", "512"),
        ("-2 ** 2", "-4"),
        ("0.1 + 0.2", "0.3"),
        ("1 / 3", "0.333333333333"),
        ("7 / 7", "1"),
        ("2 ** -2", "0.25"),
        ("2 ** 0.5", "1.41421356237"),
        ("123456789 ** 9", str(123456789**9)),
        ("+1e3", "1000"),
    ],
)
def test_calculator(expression: str, value: str) -> None:
    assert calculator(expression) == value


@pytest.mark.parametrize(
    ("expression", "error"),
    [
        ("", "the expression is malformed"),
        ("1 +", "the expression is malformed"),
        ("1 2", "the expression is malformed"),
        ("(" * 150 + "1", "the expression is malformed"),
        ("__import__('os').getpid()", "expected numbers"),
        ("x", "expected numbers"),
        ("'a' * 3", "expected numbers"),
        ("True + 1", "expected numbers"),
        ("1j", "expected numbers"),
        ("7 // 2", "expected numbers"),
        ("1,000 + 1", "expected numbers"),
        ("[1][0]", "expected numbers"),
        ("1 / 0", r"Fraction\(1, 0\)"),
        ("9 ** 9 ** 9", "the result is too large"),
        ("9 ** 9 ** -9999999", "the result is too large"),
        ("(-8) ** 0.5", "a root of a negative number"),
        ("1e999", "Invalid literal"),
        ("1 + " * 100 + "1", "the expression has more than 300 characters"),
    ],
)
def test_what_the_calculator_refuses(expression: str, error: str) -> None:
    started = time.process_time()
    with pytest.raises((ValueError, ArithmeticError), match=error):
        calculator(expression)
    assert time.process_time() - started < 1.0


@pytest.mark.parametrize(
    "expression", ["-" * 299 + "1", "9" * 299, "9**999*" * 20 + "1", "1" + "**9" * 99, "1.5**" * 50 + "2"]
)
def test_the_calculator_takes_no_time_for_what_is_deep_or_large(expression: str) -> None:
    started = time.process_time()
    with suppress(ValueError):
        assert len(calculator(expression)) < 1_300
    assert time.process_time() - started < 0.5


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def test_ready_tools_by_their_dotted_names() -> None:
    environment = Tools(
        tools=["rhymerl.environments.calculator", "rhymerl.environments.answer", "rhymerl.environments.python"],
        calls="hermes",
    )
    assert [schema["function"]["name"] for schema in environment.tool_schemas] == ["calculator", "answer", "python"]
    text = call("calculator", expression="6 * 7") + call("answer", answer=42) + call("calculator", expression="1")
    reply = environment.reply({}, [Turn(text=text)])
    assert reply is not None
    assert reply.done, "answer ends the episode, and what is called behind it is not run"
    assert [message["content"] for message in reply.content or ()] == ["42", ""]  # type: ignore[index]
    assert answer("42") == Reply(done=True)


class Quick(Python):
    time_limit_s = 1.0
    max_characters = 2_000
    unsafe_without = tuple(missing_walls())


@pytest.fixture
def notebook() -> Iterator[Quick]:
    made = Quick()
    yield made
    made.close()


def test_the_notebook_keeps_variables_and_shows_what_is_new(notebook: Quick) -> None:
    assert notebook.python("x = 3\nprint('once')") == "once\n"
    assert notebook.python("def double(y): return 2 * y\ndouble(x)") == "6\n"
    assert notebook.python("print(x)\nx += 1") == "3\n"
    assert notebook.python("x / 0") == "ZeroDivisionError: division by zero\n"
    assert notebook.python("def f(:").startswith("SyntaxError")
    assert notebook.python("import sys; print('e', file=sys.stderr); sys.exit(3)") == "e\nSystemExit: 3\n"
    assert notebook.python("double(x)\n") == "8\n"
    assert notebook.python("print('x' * 10**6)") == "x" * 2_000


def test_the_notebook_is_a_sandbox_and_what_is_stopped_leaves_nothing(notebook: Quick) -> None:
    assert notebook.python("y = 1") == ""
    for code in ("y = 2\nwhile True: pass", "y = 3\nimport os; os._exit(0)"):
        with pytest.raises(RuntimeError, match="^the code was stopped: it took longer than 1 s or ended its process$"):
            notebook.python(code)
    assert "Error" in notebook.python("open('/etc/passwd')")
    assert "MemoryError" in notebook.python("z = [0] * 10**10")
    assert notebook.python("y") == "1\n"


def test_an_episode_goes_on_elsewhere_with_its_variables() -> None:
    environment = Tools(tools=[Quick], calls="hermes")
    turns = [Turn(text=call("python", code="total = 40")), Turn(text=call("python", code="total + 2"))]
    session = environment.open({})
    assert session is not None
    replies = [session.reply({}, turns[:1]), session.reply({}, turns)]
    session.close()
    late = environment.open({})
    assert isinstance(late, Environment)
    assert [late.reply({}, turns[:number]) for number in (1, 2)] == replies, "it is asked about each turn, in order"
    late.close()
    assert [message["content"] for message in replies[1].content] == ["42\n"]  # type: ignore[union-attr]


def test_a_machine_without_the_sandbox_is_refused_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rhymerl.environments.ready.missing_walls", lambda: {"seccomp": "not there"})
    with pytest.raises(
        ConfigError,
        match=r"^the tool python: this machine offers its sandbox no seccomp \(not there\); see unsafe_without$",
    ):
        Tools(tools=[Python], calls="hermes").prepare(None)
    type("Brave", (Python,), {"unsafe_without": ("seccomp",)})().close()
