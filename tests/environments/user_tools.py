"""Tools that users might write, good and bad."""

from __future__ import annotations

import asyncio
import decimal
from typing import Any, Literal

from rhymerl import RunError
from rhymerl.environments import Reply


def add(a: int, b: int = 1) -> int:
    """Add two numbers.

    Args:
        a: One number.
        b: The other.
    """
    return a + b


def echo(value: Any) -> Any:
    """Return what it gets.

    Args:
        value: Anything.
    """
    return value


def weigh(
    unit: Literal["kg", "g"], masses: list[float], labels: dict[str, str] | None = None, rough: bool = False
) -> str:
    """Weigh things.

    Args:
        unit: The unit.
        masses: How heavy they are.
        labels: Their names.
        rough: Whether to round.
    """
    return f"{sum(masses)} {unit} {labels} {rough}"


def misbehave(how: str) -> Any:
    """Fail in some way.

    Args:
        how: The way.
    """
    if how == "lines":
        raise ValueError("one line\n  and another")
    if how == "exit":
        raise SystemExit(3)
    if how == "broken":
        raise RunError("the database is gone")
    return {"decimal": decimal.Decimal("1.5"), "key": {(1, 2): 3}, "surrogate": "\ud800"}[how]


async def wait(seconds: float) -> str:
    """Wait a while.

    Args:
        seconds: How long.
    """
    await asyncio.sleep(seconds)
    return "waited"


def praise() -> Reply:
    """Reward the policy."""
    return Reply(content="well done", reward=0.25, metrics={"praise": 1.0})


class Counter:
    """A counter with a state; `closed` has the final counts of all that have been closed."""

    closed: list[int] = []

    def __init__(self) -> None:
        self._count = 0

    def reset(self, **row: Any) -> None:
        self._count = row["start"]

    def count(self, step: int = 1) -> int:
        """Count on.

        Args:
            step: How far.
        """
        self._count += step
        return self._count

    def undocumented(self) -> None:
        raise AssertionError("no tool")

    def close(self) -> None:
        self.closed.append(self._count)


class NeedsAddress:
    def __init__(self, address: str) -> None:
        self.address = address

    def ask(self) -> str:
        """Ask."""
        return self.address


class WithoutTools:
    def ask(self) -> str:
        return ""


class Elsewhere:
    @staticmethod
    def add(a: int) -> int:
        """Add nothing.

        Args:
            a: A number.
        """
        return a


def without_hints(a):  # type: ignore[no-untyped-def]
    """Do something.

    Args:
        a: A number.
    """


def without_docstring(a: int) -> int:
    return a


def without_argument_docs(a: int) -> int:
    """Do something."""
    return a


def of_custom_class(a: decimal.Decimal) -> None:
    """Do something.

    Args:
        a: A number.
    """


def größe(a: int) -> int:
    """Measure.

    Args:
        a: A number.
    """
    return a


def with_any(*args: int) -> None:
    """Do something.

    Args:
        args: Numbers.
    """


NUMBER = 3


def spaced(a: int) -> int:
    """Measure.

    Args:
        a: A number.
    """
    return a


spaced.__name__ = "with a space"


class Refuses:
    def __init__(self) -> None:
        raise ConnectionError("nobody is there")

    def ask(self) -> str:
        """Ask."""
        return ""
