"""Checks of an algorithm's settings that their types do not make."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal, get_args, get_origin


def require(holds: bool, name: str, value: object, expected: str) -> None:
    """Raise ValueError that names the setting unless it holds."""
    if not holds:
        raise ValueError(f"{name}={value!r}: expected {expected}")


def require_types(algorithm: Any) -> None:
    """Check that a dataclass's settings are among those that their types list, and finite.

    A config has been checked already.
    """
    for field in (each for each in dataclasses.fields(algorithm) if each.init):
        value = getattr(algorithm, field.name)
        if get_origin(field.type) is Literal:
            allowed = get_args(field.type)
            require(value in allowed, field.name, value, f"one of {', '.join(allowed)}")
        elif isinstance(value, float):
            require(math.isfinite(value), field.name, value, "a finite number")
