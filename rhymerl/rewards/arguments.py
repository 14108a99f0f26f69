"""Checks of a reward's fixed arguments, for the `check` that a function brings."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from math import isfinite
from numbers import Integral, Real
from typing import Any, TypeGuard

from rhymerl.errors import ConfigError


def check_argument(reward: Any, name: str, holds: Callable[[Any], bool], expected: str) -> None:
    """Raise ConfigError for an invalid fixed argument of a Reward; the function itself checks one that is a column."""
    if name in reward.arguments and not holds(reward.arguments[name]):
        raise argument_error(reward, name, expected)


def argument_error(reward: Any, name: str, expected: str) -> ConfigError:
    """Return an error like `rewards.short.arguments.max_characters='9': expected …`."""
    return ConfigError(f"rewards.{reward.name}.arguments.{name}={reward.arguments[name]!r}: expected {expected}")


def is_number(value: object) -> TypeGuard[float]:
    """Return whether it is a finite number, and not a truth value."""
    return not isinstance(value, bool) and isinstance(value, Real) and isfinite(value)


def is_integer(value: object) -> TypeGuard[int]:
    """Return whether it is an integer, and not a truth value."""
    return not isinstance(value, bool) and isinstance(value, Integral)


def answer_text(answer: object) -> str:
    """Return a row's answer as a text. Raises ValueError for null, lists and others that no completion can equal."""
    if isinstance(answer, str | Decimal) or is_number(answer):
        return str(answer)
    raise ValueError(f"answer={answer!r:.80}: expected a text or a number")
