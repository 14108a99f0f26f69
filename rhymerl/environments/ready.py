"""Ready-made tools. Their docstrings are what the policy reads of them."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import ClassVar

from rhymerl.environments import cells
from rhymerl.environments.base import Reply, pure
from rhymerl.errors import ConfigError, RunError
from rhymerl.rewards.sandbox.run import Job, Sandbox, SandboxError, Wall, missing_walls

_MAX_EXPRESSION_CHARACTERS = 300
_MAX_BITS = 4096  # of a number


@pure
def answer(answer: str | float) -> Reply:
    """Give the final answer. Nothing can be said after it.

    Args:
        answer: The final answer.
    """
    return Reply(done=True)


@pure
def calculator(expression: str) -> str:
    """Calculate the value of an expression.

    Args:
        expression: Numbers, + - * / ** and parentheses, such as (12.5 + 3) * 2
    """
    if len(expression) > _MAX_EXPRESSION_CHARACTERS:
        raise ValueError(f"the expression has more than {_MAX_EXPRESSION_CHARACTERS} characters")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise ValueError("the expression is malformed") from error
    value = _value(tree.body)
    return str(value.numerator) if value.denominator == 1 else f"{float(value):.12g}"


def _value(node: ast.expr) -> Fraction:
    """Numbers are exact, so 0.1 + 0.2 is 0.3."""
    match node:
        case ast.Constant(value=int() | float()) if not isinstance(node.value, bool):
            return Fraction(str(node.value))
        case ast.UnaryOp(op=ast.USub() | ast.UAdd()):
            value = _value(node.operand)
            return -value if isinstance(node.op, ast.USub) else value
        case ast.BinOp() if type(node.op) in _OPERATIONS:
            value = _OPERATIONS[type(node.op)](_value(node.left), _value(node.right))
            if _num_bits(value) > _MAX_BITS:
                raise ValueError("the result is too large")
            return value
    raise ValueError("expected numbers, + - * / ** and parentheses only")


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    """Check the size first: `9**9**9` would take for ever."""
    if abs(exponent) * _num_bits(base) > 2 * _MAX_BITS:
        raise ValueError("the result is too large")
    value = base**exponent
    if isinstance(value, complex):
        raise ValueError("a root of a negative number")
    return Fraction(value)


def _num_bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())


_OPERATIONS: Mapping[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: _power,
}


class Python:
    """A notebook: `python` runs code in a sandbox (`rhymerl.rewards.sandbox`) and keeps variables for the episode.

    Nothing outlives a call. Each runs all earlier code of the episode again, without its output, and then its own; so
    the variables are a function of the transcript, up to what the code itself reads of clocks and random numbers. Code
    that is stopped leaves nothing behind. A subclass may set other limits. Raises ConfigError where the machine offers
    no sandbox.
    """

    time_limit_s: ClassVar[float] = 5.0  # for each call of the episode
    memory_mb: ClassVar[int] = 512
    max_characters: ClassVar[int] = 20_000  # of output
    unsafe_without: ClassVar[Sequence[Wall]] = ()

    def __init__(self) -> None:
        try:
            missing = {name: words for name, words in missing_walls().items() if name not in self.unsafe_without}
        except SandboxError as error:
            raise ConfigError(f"the tool python: {error}") from error
        if missing:
            offered = " and no ".join(f"{name} ({words})" for name, words in missing.items())
            raise ConfigError(f"the tool python: this machine offers its sandbox no {offered}; see unsafe_without")
        self._cells: list[str] = []
        self._sandbox = Sandbox()

    def python(self, code: str) -> str:
        """Run Python code and return what it prints and the value of its last expression. Variables are kept.

        Args:
            code: The code.
        """
        given = [*self._cells, code]
        job = Job(
            code=Path(cells.__file__).read_text(encoding="utf-8"),
            tests=[{"input": [given, self.max_characters]}],
            entry_point=cells.run_cells.__name__,
            time_limit_s=self.time_limit_s * len(given),
            memory_mb=self.memory_mb,
            unsafe_without=self.unsafe_without,
        )
        try:
            report = self._sandbox.run(job)
        except SandboxError as error:
            raise RunError(f"the tool python: {error}") from error
        if not report.values:
            raise RuntimeError(
                f"the code was stopped: it took longer than {self.time_limit_s:g} s or ended its process"
            )
        self._cells.append(code)
        return str(report.values[0])

    def close(self) -> None:
        self._sandbox.close()


python = Python  # as a dotted name among the other tools
