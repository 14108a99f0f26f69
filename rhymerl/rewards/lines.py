"""Messages of processes that run users' code: lines of JSON, each checked, since that code may write to the pipe."""

from __future__ import annotations

import json
from math import nan
from typing import Any, Literal, NamedTuple, get_args

OutcomeKind = Literal["ok", "absent", "error", "timeout", "crash", "again"]
START = -1  # the number of a process's start, which is "ok" or an "error"; it says so again as a sign of life
_MARK = "Outcome"  # in front of each


class StrayBytesError(Exception):
    """Something else than the process has written into its pipe."""


class Outcome(NamedTuple):
    """The outcome of one call; whoever made the call checks the value.

    `absent`: a reward function does not apply; `again`: it failed with others, so it must be called alone.
    """

    number: int  # of the call: its position in the chunk, or its number among all calls of an environment
    kind: OutcomeKind
    value: Any = nan
    message: str = ""
    finished_at: float = 0.0  # time.monotonic(), which all processes of a machine share


def line_of(outcome: Outcome) -> bytes:
    """Return an outcome as a line with its end."""
    return json.dumps([_MARK, *outcome]).encode() + b"\n"


def parse(line: bytes) -> Outcome:
    """Return the outcome in a line. Raises StrayBytesError for anything else."""
    try:
        mark, *fields = json.loads(line)
        outcome = Outcome(*fields)
    except (ValueError, TypeError, RecursionError) as error:
        raise StrayBytesError from error
    types = type(outcome.number), type(outcome.kind), type(outcome.message), type(outcome.finished_at)
    if mark != _MARK or types != (int, str, str, float) or outcome.kind not in get_args(OutcomeKind):
        raise StrayBytesError
    return outcome
