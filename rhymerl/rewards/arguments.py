"""What a reward's fixed arguments may be, for the `check` that a function brings."""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, TypeGuard

from rhymerl.errors import ConfigError

if TYPE_CHECKING:
    from rhymerl.rewards.base import Reward


def check_argument(reward: Reward, name: str, holds: Callable[[Any], bool], expected: str) -> None:
    """Raises ConfigError for a fixed argument that does not hold; one that is a column instead is for the function to judge."""
    if name in reward.arguments and not holds(reward.arguments[name]):
        raise argument_error(reward, name, expected)


def argument_error(reward: Reward, name: str, expected: str) -> ConfigError:
    """`rewards.short.arguments.max_characters='9': expected …`."""
    return ConfigError(f"rewards.{reward.name}.arguments.{name}={reward.arguments[name]!r}: expected {expected}")


def is_number(value: object) -> TypeGuard[float]:
    """Whether it is a finite number, and not a truth value."""
    return not isinstance(value, bool) and isinstance(value, Real) and isfinite(value)


def is_integer(value: object) -> TypeGuard[int]:
    """Whether it is an integer, and not a truth value."""
    return not isinstance(value, bool) and isinstance(value, Integral)
