"""Messages of processes that run users' code: lines of JSON, each checked, since that code may write to the pipe."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple


class StrayBytesError(Exception):
    """Something else than the process has written into its pipe."""


class Ready(NamedTuple):
    """The process's first words, and a sign of life later. It is ready unless it says what failed."""

    failure: str = ""

    @property
    def is_sound(self) -> bool:
        return type(self.failure) is str


def line_of(message: Any) -> bytes:
    """Return a message, a named tuple, as a line with its end."""
    return json.dumps([type(message).__name__, *message]).encode() + b"\n"


def parser_of(*kinds: type[Any]) -> Callable[[bytes], Any]:
    """Return what reads lines of such messages, each of which says whether it `is_sound`.

    It raises StrayBytesError for anything else.
    """
    by_name: dict[str, type[Any]] = {Ready.__name__: Ready, **{kind.__name__: kind for kind in kinds}}

    def parse(line: bytes) -> Any:
        try:
            name, *fields = json.loads(line)
            message = by_name[name](*fields)
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise StrayBytesError from error
        if not message.is_sound:
            raise StrayBytesError
        return message

    return parse
