"""What a checkpoint holds of a module's arguments, and what to say when it could not hold one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rhymerl.errors import ConfigError

_LOST = "_lost_"


def held(value: Any, express: Callable[[Any], Any]) -> Any:
    """`express(value)`, plain containers; a mark in its place, with the reason, when that raises TypeError."""
    try:
        return express(value)
    except TypeError as error:
        return {_LOST: str(error)}


def refuse_lost(**arguments: object) -> None:
    """Raise ConfigError for an argument that is the mark of one which the checkpoint could not hold."""
    for name, value in arguments.items():
        if isinstance(value, Mapping) and _LOST in value:
            raise ConfigError(
                f"{name}: given as an object that a checkpoint cannot hold ({value[_LOST]}); "
                f"pass {name}= to load_from_checkpoint again"
            )
