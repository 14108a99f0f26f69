"""Checks of an algorithm's settings that their types do not make."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, get_args, get_origin

from rhymerl.errors import ConfigError


def require(holds: bool, name: str, value: object, expected: str) -> None:
    """Raise ConfigError that names the setting unless it holds."""
    if not holds:
        raise ConfigError(f"algo.{name}={value!r}: expected {expected}")


def require_choices(algorithm: Any) -> None:
    """Of a dataclass, those settings whose type lists what they may be; a config has been checked already."""
    for field in dataclasses.fields(algorithm):
        if get_origin(field.type) is Literal:
            value, allowed = getattr(algorithm, field.name), get_args(field.type)
            require(value in allowed, field.name, value, f"one of {', '.join(allowed)}")
