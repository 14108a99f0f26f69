"""A memory of replies: an environment that is a pure function is asked once for what follows from the same."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from time import monotonic, time
from typing import Any, NamedTuple

from rhymerl.environments.base import Reply, Turn, transcript_key
from rhymerl.environments.pool import EnvironmentPool, Replied, packed
from rhymerl.hooks import Hooks

ENTRY_BYTES = 400  # what Python takes for an entry beside the reply itself


def key_of(environment: Any, row: Mapping[str, Any], turns: Sequence[Turn]) -> str:
    """Return a hash of all that a pure environment's reply follows from, as its `memory_key` says.

    What differs has another key. What is equal may too, where Python holds it in another way: then the environment is
    asked again. Raises EpisodeError for columns that cannot be sent to a process either.
    """
    with Hooks("environment", environment):
        followed = getattr(environment, "memory_key", transcript_key)(row, turns)  # a task may have none
    return blake2b(packed(followed), digest_size=16).hexdigest()


class Remembered(NamedTuple):
    """A reply, and how long the call took that it comes from."""

    reply: Reply
    took_s: float


class ReplyMemory:
    """The replies that were last made or looked up, by key, in at most `max_bytes`."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._packed: OrderedDict[str, bytes] = OrderedDict()  # the one that goes next is first
        self.num_bytes = 0

    def get(self, key: str) -> Remembered | None:
        """Return a reply of its own, which stays longer for it."""
        if key not in self._packed:
            return None
        self._packed.move_to_end(key)
        return Remembered(*pickle.loads(self._packed[key]))

    def add(self, key: str, reply: Reply, took_s: float) -> None:
        """Remember a reply that is not there, unless it is larger than all the room, and forget others for it."""
        packed_reply = pickle.dumps((reply, took_s))
        if len(packed_reply) + ENTRY_BYTES > self._max_bytes:
            return
        self._packed[key] = packed_reply
        self.num_bytes += len(packed_reply) + ENTRY_BYTES
        while self.num_bytes > self._max_bytes:
            self.num_bytes -= len(self._packed.popitem(last=False)[1]) + ENTRY_BYTES


class _Waiter(NamedTuple):
    """An episode that waits for the reply to its transcript."""

    episode: str
    row: Mapping[str, Any]
    turns: Sequence[Turn]
    asked_at: float


class RememberingPool:
    """Asks a pool for each reply once: whoever asks for it again, even at the same time, gets what the first one got.

    The pool, of processes of `environment`, is asked in the name of the key, so that no episode that leaves takes the
    reply away from others. What failed is not remembered, and each of the others who waited for it is asked about
    alone.
    """

    def __init__(self, pool: EnvironmentPool, environment: Any, *, max_bytes: int) -> None:
        self._pool = pool
        self._environment = environment
        self._memory = ReplyMemory(max_bytes)
        self._waiting: dict[str, list[_Waiter]] = {}  # for calls under way, by key; the first one's call it is
        self._key_of: dict[str, str] = {}  # of the call that an episode waits for
        self._replied: list[Replied] = []

    def ask(self, episode: str, row: Mapping[str, Any], turns: Sequence[Turn]) -> None:
        """Ask for the reply to the last turn of an episode that waits for none."""
        key = key_of(self._environment, row, turns)
        known = self._memory.get(key)
        if known is not None:
            self._replied.append(Replied(episode, known.reply, "", 0.0, time(), saved_s=known.took_s))
            return
        self._key_of[episode] = key
        waiters = self._waiting.setdefault(key, [])
        waiters.append(_Waiter(episode, row, turns, monotonic()))
        if len(waiters) == 1:
            self._pool.ask(key, row, turns)

    def forget(self, episode: str) -> None:
        """This episode waits for no reply, but others may wait for the same one."""
        self._replied = [each for each in self._replied if each.episode != episode]
        self._pool.forget(episode)
        key = self._key_of.pop(episode, None)
        if key is None:
            return
        self._waiting[key] = [each for each in self._waiting[key] if each.episode != episode]
        if not self._waiting[key]:
            del self._waiting[key]
            self._pool.forget(key)

    def replied(self, timeout_s: float | None) -> list[Replied]:
        """Return what has been replied; where that is nothing yet, wait for the first so long, or without a limit."""
        for each in self._pool.replied(0.0 if self._replied else timeout_s):
            self._settle(each)
        replied, self._replied = self._replied, []
        return replied

    def close(self) -> None:
        """End the pool; may be called twice."""
        self._pool.close()

    def _settle(self, replied: Replied) -> None:
        waiters = self._waiting.pop(replied.episode, None)
        if waiters is None:  # an episode that was asked about alone
            self._replied.append(replied)
            return
        for each in waiters:
            del self._key_of[each.episode]
        now, (first, *others) = monotonic(), waiters
        self._replied.append(replied._replace(episode=first.episode, waited_s=now - first.asked_at))
        if replied.reply is None:
            for each in others:
                self._pool.ask(each.episode, each.row, each.turns)
            return
        self._memory.add(replied.episode, replied.reply, replied.took_s)
        self._replied += [
            replied._replace(episode=each.episode, waited_s=now - each.asked_at, saved_s=replied.took_s)
            for each in others
        ]
