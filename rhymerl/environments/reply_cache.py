"""A cache of replies: an environment that is a pure function is asked once for what follows from the same."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

from rhymerl.environments.base import Reply, Turn, transcript_key
from rhymerl.errors import EpisodeError
from rhymerl.hooks import Hooks

ENTRY_BYTES = 400  # what Python takes for an entry beside the reply itself


def packed(value: Any) -> bytes:
    """Return what has a row's columns in it, as bytes. Raises EpisodeError where they cannot be sent."""
    try:
        return pickle.dumps(value)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise EpisodeError(f"the row's columns cannot be sent to an environment's process: {error}") from error


def key_of(environment: Any, row: Mapping[str, Any], turns: Sequence[Turn]) -> str:
    """Return a hash of all that a pure environment's reply follows from, as its `memory_key` says.

    What differs has another key. What is equal may too, where Python holds it in another way: then the environment is
    asked again. Raises EpisodeError for columns that cannot be sent to a process either.
    """
    with Hooks("environment", environment):
        followed = getattr(environment, "memory_key", transcript_key)(row, turns)  # a task may have none
    return blake2b(packed(followed), digest_size=16).hexdigest()


class ReplyCache:
    """The replies that were last made or looked up, by key, in at most `max_bytes`."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._packed: OrderedDict[str, bytes] = OrderedDict()  # the one that goes next is first
        self.num_bytes = 0

    def get(self, key: str) -> tuple[Reply, float] | None:
        """Return a reply of its own, which stays longer for it, and how long the call took that it comes from."""
        if key not in self._packed:
            return None
        self._packed.move_to_end(key)
        found: tuple[Reply, float] = pickle.loads(self._packed[key])
        return found

    def add(self, key: str, reply: Reply, took_s: float) -> None:
        """Remember a reply that is not there, unless it is larger than all the room, and forget others for it."""
        packed_reply = pickle.dumps((reply, took_s))
        if len(packed_reply) + ENTRY_BYTES > self._max_bytes:
            return
        self._packed[key] = packed_reply
        self.num_bytes += len(packed_reply) + ENTRY_BYTES
        while self.num_bytes > self._max_bytes:
            self.num_bytes -= len(self._packed.popitem(last=False)[1]) + ENTRY_BYTES
