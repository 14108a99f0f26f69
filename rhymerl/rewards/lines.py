"""The messages of a reward process: lines of JSON, each checked. Its pipe is open to whatever a reward function does."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import NamedTuple, get_args

from rhymerl.rewards.calls import Outcome, OutcomeKind

_MAX_LINE_BYTES = 2**16
_TYPES = {"started": (str, str), "outcome": (int, str, float, str, float)}


class Started(NamedTuple):
    """The process's first words. It is ready unless it says what failed."""

    reward: str = ""
    failure: str = ""


class StrayBytesError(Exception):
    """Something else than the process has written into its pipe."""


def line_of(message: Started | Outcome) -> bytes:
    """Return the message as a line, with its end."""
    kind = "started" if isinstance(message, Started) else "outcome"
    return json.dumps([kind, *message]).encode() + b"\n"


class LineReader:
    """Reads from a descriptor what `line_of` has made."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._remainder = b""

    def read(self) -> Iterator[Started | Outcome]:
        """Return what there is by now; wait only where there is nothing. Raises EOFError at the end, OSError and StrayBytesError."""
        data = os.read(self._fd, _MAX_LINE_BYTES)
        if not data:
            raise EOFError
        *lines, self._remainder = (self._remainder + data).split(b"\n")
        yield from map(_parse, lines)
        if len(self._remainder) > _MAX_LINE_BYTES:
            raise StrayBytesError


def _parse(line: bytes) -> Started | Outcome:
    try:
        kind, *fields = json.loads(line)
        types = _TYPES[kind]
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise StrayBytesError from error
    if tuple(map(type, fields)) != types or (kind == "outcome" and fields[1] not in get_args(OutcomeKind)):
        raise StrayBytesError
    return Started(*fields) if kind == "started" else Outcome(*fields)
