"""The messages of an environment's process: lines of JSON, each checked, since environments may write to its pipe."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rhymerl.rewards.lines import StrayBytesError

MAX_LINE_BYTES = 2**24


class Ready(NamedTuple):
    """The process's first words, and a sign of life later. It is ready unless it says what failed."""

    failure: str = ""


class ReplyLine(NamedTuple):
    """What came of a call: a reply as plain data, or a failure in one line."""

    number: int
    failure: str = ""
    content: str | Sequence[Mapping[str, Any]] | None = None
    reward: float | None = None
    done: bool = False
    metrics: Mapping[str, float] = {}


_KINDS: dict[str, type[Ready | ReplyLine]] = {"ready": Ready, "reply": ReplyLine}
_NUMBERS = (int, float)


def line_of(message: Ready | ReplyLine) -> bytes:
    """Return the message as a line, with its end."""
    kind = "ready" if isinstance(message, Ready) else "reply"
    return json.dumps([kind, *message]).encode() + b"\n"


def parse(line: bytes) -> Ready | ReplyLine:
    """Read what `line_of` has made; raises StrayBytesError for anything else."""
    try:
        kind, *fields = json.loads(line)
        message = _KINDS[kind](*fields)
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise StrayBytesError from error
    if not _is_sound(message):
        raise StrayBytesError
    return message


def _is_sound(message: Any) -> bool:
    if type(message.failure) is not str or isinstance(message, Ready):
        return type(message.failure) is str
    return (
        type(message.number) is int
        and isinstance(message.content, str | list | None)
        and isinstance(message.reward, float | None)
        and type(message.done) is bool
        and isinstance(message.metrics, dict)
        and all(isinstance(value, float) for value in message.metrics.values())
    )
