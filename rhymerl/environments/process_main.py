"""The program of an environment's process: it asks an environment for replies, many at once, until its parent leaves.

Started by `rhymerl.environments.pool` only. It imports this package and the user's modules, nothing heavy.
"""

from __future__ import annotations

import asyncio
import inspect
import pickle
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

from rhymerl.environments.base import Turn
from rhymerl.environments.replies import checked_reply
from rhymerl.rewards.calls import Attempt
from rhymerl.rewards.child import Parent
from rhymerl.rewards.lines import Ready, line_of

BEAT_S = 0.5


class ProcessSetup(NamedTuple):
    """The first message: a pickled environment, and how many calls of it run at once."""

    environment: bytes
    num_threads: int


class Ask(NamedTuple):
    """A call of `reply` about an episode; with no turns, the episode is over, however it ended."""

    number: int
    episode: str
    row: Mapping[str, Any]
    turns: Sequence[Turn]


class ReplyLine(NamedTuple):
    """What came of a call: a reply as plain data, or a failure in one line."""

    number: int
    failure: str = ""
    content: str | Sequence[Mapping[str, Any]] | None = None
    reward: float | None = None
    done: bool = False
    metrics: Mapping[str, float] = {}

    @property
    def is_sound(self) -> bool:
        """Return whether it is of these types, as it came from another process."""
        values: tuple[Any, ...] = self
        number, failure, content, reward, done, metrics = values
        return (
            (type(number), type(failure), type(done), type(metrics)) == (int, str, bool, dict)
            and isinstance(content, str | list | None)
            and isinstance(reward, float | None)
            and all(isinstance(value, float) for value in metrics.values())
        )


def serve(parent: Parent) -> None:
    """Reply to calls; the first message has the environment."""
    setup: ProcessSetup = parent.receive()
    with Attempt() as attempt:
        replies = _Replies(pickle.loads(setup.environment))
    parent.send(line_of(Ready(failure=attempt.message)))
    if attempt.error is not None:
        return
    threading.Thread(target=_beat, args=(parent,), daemon=True).start()
    ask: Ask
    with ThreadPoolExecutor(setup.num_threads) as threads:
        for ask in parent.messages():
            over = replies.taken_over(ask)
            if ask.turns:
                session = replies.session_of(ask)
                threads.submit(lambda ask, session: parent.send(replies.line(ask, session)), ask, session)
            if over is not None:
                threads.submit(over.close)
        replies.close()


def _beat(parent: Parent) -> None:
    """Say now and then that this process runs: not where a call keeps the interpreter to itself."""
    with suppress(OSError):
        while True:
            time.sleep(BEAT_S)
            parent.send(line_of(Ready()))


class _LiveSession:
    """A live session of an episode, for one call at a time, and the number of turns that it was asked about."""

    def __init__(self, environment: Any, done: Callable[[Any], Any]) -> None:
        self.num_asked = 0  # the calls under way included
        self._environment = environment
        self._done = done  # what user code returned, or what its coroutine comes to
        self._num_seen = 0
        self._live: Any = None
        self._lock = threading.Lock()

    def reply(self, ask: Ask) -> Any:
        """Return what it says to the last turn; one that has not seen the turns before is asked about these first."""
        with self._lock:
            if self._live is None:
                self._live = self._done(self._environment.open(ask.row)) or self._environment
            num_lacking = 0 if self._live is self._environment else len(ask.turns) - 1 - self._num_seen
            for number in range(len(ask.turns) - num_lacking, len(ask.turns)):
                before = [*ask.turns[: number - 1], replace(ask.turns[number - 1], reply=None)]
                self._done(self._live.reply(ask.row, before))
            self._num_seen = len(ask.turns)
            return self._done(self._live.reply(ask.row, list(ask.turns)))

    def close(self) -> None:
        """End it, after the call under way."""
        with self._lock, Attempt():
            live, self._live = self._live, None
            if live is not None and live is not self._environment and hasattr(live, "close"):
                self._done(live.close())


class _Replies:
    """An environment and its episodes' sessions; one that is missing, or elsewhere in its episode, is replaced."""

    def __init__(self, environment: Any) -> None:
        self._environment = environment
        self._has_sessions = environment.has_sessions
        self._sessions: dict[str, _LiveSession] = {}  # the reader's alone
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def taken_over(self, ask: Ask) -> _LiveSession | None:
        """Return a session of the episode that cannot go on with this call, in the order of calls: it is over."""
        known = self._sessions.get(ask.episode)
        return self._sessions.pop(ask.episode) if known is not None and known.num_asked != len(ask.turns) - 1 else None

    def session_of(self, ask: Ask) -> _LiveSession | None:
        """Return the session for a call, in the order of calls; None where there are no sessions."""
        if not self._has_sessions:
            return None
        session = self._sessions.setdefault(ask.episode, _LiveSession(self._environment, self._done))
        session.num_asked = len(ask.turns)
        return session

    def line(self, ask: Ask, session: _LiveSession | None) -> bytes:
        """Return what the environment says, or that it failed."""
        with Attempt() as attempt:
            said = session.reply(ask) if session is not None else self._asked(ask)
            reply = checked_reply(said)
            return line_of(ReplyLine(ask.number, "", reply.content, reply.reward, reply.done, reply.metrics))
        return line_of(ReplyLine(ask.number, failure=attempt.message))

    def _asked(self, ask: Ask) -> Any:
        return self._done(self._environment.reply(ask.row, list(ask.turns)))

    def close(self) -> None:
        for session in self._sessions.values():
            session.close()

    def _done(self, value: Any) -> Any:
        """Return what user code returned, or what its coroutine comes to."""
        if not inspect.isawaitable(value):
            return value

        async def awaited() -> Any:
            return await value

        return asyncio.run_coroutine_threadsafe(awaited(), self._loop).result()
