"""Processes that call an environment.

If it raises, hangs or kills its process, only the episode concerned fails. No thread: whoever calls `replied` moves
calls out and answers in.
"""

from __future__ import annotations

import os
import pickle
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from math import inf
from time import monotonic, time
from typing import Any, NamedTuple
from zlib import crc32

from rhymerl.environments.base import Reply, Turn, checked_reply
from rhymerl.environments.process_main import BEAT_S, NUM_THREADS, Ask
from rhymerl.environments.reply_cache import ReplyCache, key_of, packed
from rhymerl.errors import EpisodeError
from rhymerl.rewards.lines import Outcome, StrayBytesError
from rhymerl.rewards.process import GRACE_S, ChildProcess, ProcessPool

_LOOK_S = 0.5  # between two looks at what is late, and at what may be sent or started
_AWAY_S = 1.0
_SILENT_S = 3 * BEAT_S


class Replied(NamedTuple):
    """The outcome of a call, reply or failure: it waited `waited_s - took_s` for its process, then `took_s`."""

    episode: str
    reply: Reply | None
    failure: str
    waited_s: float
    replied_at: float  # in Unix time
    took_s: float = 0.0
    saved_s: float | None = None  # what the call took that did not have to be made, of a reply that was remembered


@dataclass(slots=True, eq=False)
class _Call:
    ask: Ask
    key: str | None = None  # that of its reply in the memory
    asked_at: dict[str, float] = field(default_factory=dict)  # by episode, for all that wait for it
    sent_at: float = 0.0
    deadline: float = inf


class _Process(ChildProcess):
    """A process with the calls that it is at, and those that wait for it."""

    pending: dict[int, _Call]

    def __init__(self, environment: bytes) -> None:
        super().__init__("rhymerl.environments.process_main", environment)
        self.waiting: deque[_Call] = deque()
        self.suspects: deque[_Call] = deque()  # one of which has killed the process: each is asked alone
        self.alone: set[int] = set()  # the call that is asked alone now

    def start(self) -> None:
        super().start()
        os.set_blocking(self.connection.fileno(), False)  # what it does not read yet is kept here
        self.unsent = bytearray()

    def put(self, ask: Ask) -> None:
        message = packed(ask)
        self.unsent += len(message).to_bytes(4, "big") + message  # as Connection.recv_bytes reads it

    def next_call(self) -> _Call | None:
        if self.suspects or self.pending.keys() & self.alone:
            if self.pending:
                return None
            call = self.suspects.popleft()
            self.alone = {call.ask.number}
            return call
        return self.waiting.popleft() if self.waiting and len(self.pending) < NUM_THREADS else None


class EnvironmentPool(ProcessPool[_Process]):
    """Asks an environment in `num_processes` processes, each reply within `timeout_s`.

    All calls about an episode go to one process, which may keep a session for it. With a `memory`, which is for pure
    environments, whoever asks for the same reply again, even at the same time, gets what the first one got; what failed
    is not remembered, and each of the others who waited for it is asked about alone. Raises EpisodeError when a process
    cannot work at all.
    """

    error = EpisodeError
    name = "an environment's process"
    asked_for = "reply"
    shares_work = False

    def __init__(
        self,
        environment: Any,
        *,
        num_processes: int = 2,
        timeout_s: float = 60.0,
        memory: ReplyCache | None = None,
    ) -> None:
        pickled = pickle.dumps(environment)
        super().__init__([_Process(pickled) for _ in range(num_processes)])
        self._environment = environment
        self._timeout_s = timeout_s
        self._memory = memory
        self._has_sessions = environment.has_sessions
        self._numbers = count()
        self._looked_at = monotonic()
        self._call_of: dict[str, _Call] = {}  # the call whose answer is wanted, by episode
        self._shared: dict[str, _Call] = {}  # calls under way, by key
        self._replied: list[Replied] = []

    def ask(self, episode: str, row: Mapping[str, Any], turns: Sequence[Turn]) -> None:
        """Ask for the reply to the last turn of an episode, of whose replies only the latest is wanted.

        Calls are sent when `replied` is called, many at once.
        """
        key = None
        if self._memory is not None:
            key = key_of(self._environment, row, turns)
            if (known := self._memory.get(key)) is not None:
                reply, took_s = known
                self._replied.append(Replied(episode, reply, "", 0.0, time(), saved_s=took_s))
                return
        if key is not None and key in self._shared:
            self._wait(episode, self._shared[key])
        else:
            self._call(episode, row, turns, key)

    def _call(self, episode: str, row: Mapping[str, Any], turns: Sequence[Turn], key: str | None = None) -> None:
        call = _Call(Ask(next(self._numbers), episode, row, turns), key)
        self._process(episode).waiting.append(call)
        self._wait(episode, call)
        if key is not None:
            self._shared[key] = call

    def _wait(self, episode: str, call: _Call) -> None:
        self._call_of[episode] = call
        call.asked_at[episode] = monotonic()

    def forget(self, episode: str) -> None:
        """Nobody waits for a reply, and the episode is over, or goes on elsewhere: its session ends."""
        self._replied = [each for each in self._replied if each.episode != episode]
        call = self._call_of.pop(episode, None)
        if call is not None:
            del call.asked_at[episode]
            if not call.asked_at:
                self._drop(call)
        process = self._process(episode)
        if self._has_sessions and process.is_ready:
            process.put(Ask(next(self._numbers), episode, {}, ()))
            self._flush(process)

    def _drop(self, call: _Call) -> None:
        """Nobody wants its reply."""
        if call.key is not None:
            del self._shared[call.key]
        process = self._process(call.ask.episode)
        for queue in (process.waiting, process.suspects):
            if call in queue:
                queue.remove(call)

    def replied(self, timeout_s: float | None) -> list[Replied]:
        """Return what has been replied; where that is nothing yet, wait for the first so long, or without a limit."""
        until = inf if timeout_s is None else monotonic() + timeout_s
        self._turn(0.0)
        while not self._replied and self._call_of and (left := until - monotonic()) > 0:
            self._turn(min(left, _LOOK_S))
        replied, self._replied = self._replied, []
        return replied

    def _process(self, episode: str) -> _Process:
        return self._processes[crc32(episode.encode()) % len(self._processes)]

    def _turn(self, timeout_s: float) -> None:
        """Read every answer that is there, waiting so long for the first; then judge; then send."""
        self._excuse(monotonic() - self._looked_at)
        self._listen(timeout_s)
        for process in self._processes:
            self._judge(process)
            self._fill(process)
        self._looked_at = monotonic()

    def _excuse(self, away_s: float) -> None:
        """Calls do not pay for a time in which nobody looked: their answers may have waited for it."""
        if away_s > _AWAY_S:
            for process in [each for each in self._processes if each.is_running]:
                process.heard_at += away_s
                for call in process.pending.values():
                    call.deadline += away_s

    def _judge(self, process: _Process) -> None:
        """End a process in which a call takes too long; the others in it are asked again.

        Where a process does not even give a sign of life, any of its calls may be the one that keeps the interpreter to
        itself.
        """
        now = monotonic()
        late = [call for call in process.pending.values() if call.deadline < now]
        if late and len(process.pending) > 1 and now - process.heard_at > _SILENT_S:
            self._end(process)
            self._lose_calls(process, "")
        elif late:
            self._end(process)
            process.waiting.extendleft(call for call in reversed(process.pending.values()) if call not in late)
            process.pending = {}
            for call in late:
                self._settle(call, failure=f"it took longer than {self._timeout_s:g} s")

    def _fill(self, process: _Process) -> None:
        has_calls = bool(process.waiting or process.suspects)
        if has_calls and not process.is_running and monotonic() >= process.start_not_before:
            self._start(process)
        if not process.is_ready or not self._flush(process):
            return
        while (call := process.next_call()) is not None:
            call.sent_at = monotonic()
            call.deadline = call.sent_at + self._timeout_s + GRACE_S
            process.pending[call.ask.number] = call
            process.put(call.ask)
        self._flush(process)

    def _flush(self, process: _Process) -> bool:
        """Send what a process reads without waiting; return whether it is alive. A dead one loses its calls."""
        try:
            while process.unsent:
                del process.unsent[: os.write(process.connection.fileno(), process.unsent)]
        except BlockingIOError:
            pass
        except OSError:
            self._lose(process)
            return False
        return True

    def _take(self, process: _Process, outcome: Outcome) -> None:
        try:
            call = process.pending[outcome.number]
            reply = checked_reply(Reply(**outcome.value)) if outcome.kind == "ok" else None
        except (LookupError, TypeError, ValueError) as error:
            raise StrayBytesError from error
        del process.pending[outcome.number]
        self._settle(call, reply=reply, failure=outcome.message)

    def _settle(self, call: _Call, *, reply: Reply | None = None, failure: str = "") -> None:
        """Tell those who still wait for it."""
        if not call.asked_at:
            return
        now = monotonic()
        took_s = now - call.sent_at
        if call.key is not None:
            del self._shared[call.key]
            if reply is not None and self._memory is not None:
                self._memory.add(call.key, reply, took_s)
        for index, (episode, asked_at) in enumerate(call.asked_at.items()):
            if reply is None and index:
                self._call(episode, call.ask.row, call.ask.turns)
                continue
            del self._call_of[episode]
            saved_s = took_s if index else None
            self._replied.append(Replied(episode, reply, failure, now - asked_at, time(), took_s, saved_s))

    def _lose_calls(self, process: _Process, message: str) -> None:
        """The call that it was at is settled, or each of several is asked again alone."""
        calls = list(process.pending.values())
        process.pending = {}
        if len(calls) == 1:
            self._settle(calls[0], failure=message)
        else:
            process.suspects.extend(calls)
