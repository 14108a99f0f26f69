"""The messages of a reward process: lines of JSON, each checked, since reward functions may write to its pipe."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from typing import Any, get_args

from rhymerl.rewards.calls import Outcome, OutcomeKind

MAX_LINE_BYTES = 2**16
_TYPES = (int, str, float, str, float)  # of an Outcome


class StrayBytesError(Exception):
    """Something else than the process has written into its pipe."""


def line_of(outcome: Outcome) -> bytes:
    """Return the outcome as a line, with its end."""
    return json.dumps(["outcome", *outcome]).encode() + b"\n"


class LineReader:
    """Reads lines of limited size from a descriptor; `parse` reads each or refuses it with StrayBytesError."""

    def __init__(self, fd: int, parse: Callable[[bytes], Any], *, max_bytes: int = MAX_LINE_BYTES) -> None:
        self._fd = fd
        self._parse = parse
        self._max_bytes = max_bytes
        self._remainder = b""

    def read(self) -> Iterator[Any]:
        """Return all lines so far; wait only if none. Raises EOFError at the end, OSError and StrayBytesError."""
        data = os.read(self._fd, MAX_LINE_BYTES)
        if not data:
            raise EOFError
        *lines, self._remainder = (self._remainder + data).split(b"\n")
        yield from map(self._parse, lines)
        if len(self._remainder) > self._max_bytes:
            raise StrayBytesError


def parse(line: bytes) -> Outcome:
    """Read what `line_of` has made."""
    try:
        kind, *fields = json.loads(line)
        outcome = Outcome(*fields)
    except (ValueError, TypeError, RecursionError) as error:
        raise StrayBytesError from error
    if kind != "outcome" or tuple(map(type, outcome)) != _TYPES or outcome.kind not in get_args(OutcomeKind):
        raise StrayBytesError
    return outcome
