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
from dataclasses import asdict, replace
from typing import Any, NamedTuple

from rhymerl.environments.base import Turn, checked_reply
from rhymerl.rewards.calls import Attempt
from rhymerl.rewards.child import Parent
from rhymerl.rewards.lines import START, Outcome, line_of

BEAT_S = 0.5
NUM_THREADS = 32  # calls at the same time in a process


class Ask(NamedTuple):
    """A call of `reply` about an episode; with no turns, the episode is over, however it ended."""

    number: int
    episode: str
    row: Mapping[str, Any]
    turns: Sequence[Turn]


def serve(parent: Parent) -> None:
    """Reply to calls; the first message has the environment, pickled."""
    given: bytes = parent.receive()
    with Attempt() as attempt:
        replies = _Replies(pickle.loads(given))
    if attempt.error is not None:
        words = f"environment: its process cannot import it: {attempt.message}"
        parent.send(line_of(Outcome(START, "error", message=words)))
        return
    parent.send(line_of(Outcome(START, "ok")))
    threading.Thread(target=_beat, args=(parent,), daemon=True).start()
    ask: Ask
    with ThreadPoolExecutor(NUM_THREADS) as threads:
        for ask in parent.messages():
            session = replies.session_of(ask, threads)
            if ask.turns:
                threads.submit(lambda ask, session: parent.send(replies.line(ask, session)), ask, session)
        replies.close()


def _beat(parent: Parent) -> None:
    """Say now and then that this process runs: not where a call keeps the interpreter to itself."""
    with suppress(OSError):
        while True:
            time.sleep(BEAT_S)
            parent.send(line_of(Outcome(START, "ok")))


class _LiveSession:
    """A live session of an episode, for one call at a time, and the number of turns that it was asked about."""

    def __init__(self, environment: Any, done: Callable[[Any], Any]) -> None:
        self.num_asked = 0  # the calls under way included
        self._environment = environment
        self._done = done  # what user code returned, or what its coroutine comes to
        self._live: Any = None
        self._lock = threading.Lock()

    def reply(self, ask: Ask) -> Any:
        """Return what it says to the last turn; one that has not seen the turns before is asked about these first."""
        with self._lock:
            if self._live is None:
                self._live = self._done(self._environment.open(ask.row)) or self._environment
                for number in range(1, len(ask.turns)) if self._live is not self._environment else ():
                    before = [*ask.turns[: number - 1], replace(ask.turns[number - 1], reply=None)]
                    self._done(self._live.reply(ask.row, before))
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

    def session_of(self, ask: Ask, threads: ThreadPoolExecutor) -> _LiveSession | None:
        """Return the session for a call, in the order of calls; None where there are no sessions.

        One that cannot go on with this call is over, and ends in one of the threads.
        """
        session = self._sessions.pop(ask.episode, None)
        if session is not None and session.num_asked != len(ask.turns) - 1:
            threads.submit(session.close)
            session = None
        if not self._has_sessions or not ask.turns:
            return None
        session = self._sessions[ask.episode] = session or _LiveSession(self._environment, self._done)
        session.num_asked = len(ask.turns)
        return session

    def line(self, ask: Ask, session: _LiveSession | None) -> bytes:
        """Return what the environment says, or that it failed."""
        with Attempt() as attempt:
            asked = session.reply(ask) if session is not None else self._environment.reply(ask.row, list(ask.turns))
            reply = checked_reply(self._done(asked))
            return line_of(Outcome(ask.number, "ok", asdict(reply)))
        return line_of(Outcome(ask.number, "error", message=attempt.message))

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
