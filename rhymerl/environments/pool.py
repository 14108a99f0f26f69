"""Processes that call an environment.

If it raises, hangs or kills its process, only the episode concerned fails. No thread: whoever calls `replied` moves
calls out and answers in.
"""

from __future__ import annotations

import os
import pickle
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from math import inf
from time import monotonic, time
from typing import Any, NamedTuple
from zlib import crc32

from rhymerl.environments.base import Reply, Turn
from rhymerl.environments.process_main import BEAT_S, Ask, ProcessSetup, ReplyLine
from rhymerl.errors import EpisodeError
from rhymerl.rewards.lines import Ready, StrayBytesError, parser_of
from rhymerl.rewards.process import GRACE_S, START_TIMEOUT_S, ChildProcess, Listener

_THREADS = 32  # calls at the same time in a process
_LOOK_S = 0.5  # between two looks at what may be sent or started
_AWAY_S = 1.0
_SILENT_S = 3 * BEAT_S
_MOST_STARTS = 5  # of a process, one after another, that come to nothing


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
    asked_at: float
    sent_at: float = 0.0
    deadline: float = inf


def packed(value: Any) -> bytes:
    """Return what has a row's columns in it, as bytes. Raises EpisodeError where they cannot be sent."""
    try:
        return pickle.dumps(value)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise EpisodeError(f"the row's columns cannot be sent to an environment's process: {error}") from error


class _Process(ChildProcess):
    """The process in a seat, and the calls that it is at."""

    def __init__(self, setup: ProcessSetup, seat: _Seat) -> None:
        super().__init__("rhymerl.environments.process_main", setup, parser_of(ReplyLine))
        os.set_blocking(self.connection.fileno(), False)  # what it does not read yet is kept here
        self.seat = seat
        self.unsent = bytearray()
        self.heard_at = monotonic()
        self.pending: dict[int, _Call] = {}

    def put(self, ask: Ask) -> None:
        message = packed(ask)
        self.unsent += len(message).to_bytes(4, "big") + message  # as Connection.recv_bytes reads it


class _Seat:
    """The place of one process, which is started when there is something to ask, and again when it has died."""

    def __init__(self) -> None:
        self.process: _Process | None = None
        self.waiting: deque[_Call] = deque()
        self.suspects: deque[_Call] = deque()  # one of which has killed its process: each is asked alone
        self.alone: set[int] = set()  # the call that is asked alone now
        self.num_failed = 0  # starts, one after another

    def next_call(self) -> _Call | None:
        assert self.process is not None
        pending = self.process.pending
        if self.suspects or pending.keys() & self.alone:
            if pending:
                return None
            call = self.suspects.popleft()
            self.alone = {call.ask.number}
            return call
        return self.waiting.popleft() if self.waiting and len(pending) < _THREADS else None


class EnvironmentPool:
    """Asks an environment in `num_processes` processes, each reply within `timeout_s`.

    All calls about an episode go to one process, which may keep a session for it. Raises EpisodeError when a process
    cannot work at all.
    """

    def __init__(self, environment: Any, *, num_processes: int = 2, timeout_s: float = 60.0) -> None:
        self._setup = ProcessSetup(pickle.dumps(environment), _THREADS)
        self._timeout_s = timeout_s
        self._has_sessions = environment.has_sessions
        self._seats = [_Seat() for _ in range(num_processes)]
        self._numbers = count()
        self._listener = Listener(self._take, self._lose, asked_for="reply")
        self._looked_at = monotonic()
        self._current: dict[str, int] = {}  # the call whose answer is wanted, by episode
        self._replied: list[Replied] = []

    def ask(self, episode: str, row: Mapping[str, Any], turns: Sequence[Turn]) -> None:
        """Ask for the reply to the last turn of an episode, of whose replies only the latest is wanted.

        Calls are sent when `replied` is called, many at once.
        """
        number = self._current[episode] = next(self._numbers)
        self._seat(episode).waiting.append(_Call(Ask(number, episode, row, turns), asked_at=monotonic()))

    def forget(self, episode: str) -> None:
        """Nobody waits for a reply, and the episode is over, or goes on elsewhere: its session ends."""
        self._replied = [each for each in self._replied if each.episode != episode]
        is_asked = self._current.pop(episode, None) is not None
        if not is_asked and not self._has_sessions:
            return
        seat = self._seat(episode)
        for queue in (seat.waiting, seat.suspects):
            for call in [each for each in queue if each.ask.episode == episode]:
                queue.remove(call)
        if self._has_sessions and seat.process is not None and seat.process.is_ready:
            seat.process.put(Ask(next(self._numbers), episode, {}, ()))
            self._flush(seat.process)

    def replied(self, timeout_s: float | None) -> list[Replied]:
        """Return what has been replied; where that is nothing yet, wait for the first so long, or without a limit."""
        until = inf if timeout_s is None else monotonic() + timeout_s
        self._turn(0.0)
        while not self._replied and self._current and (left := until - monotonic()) > 0:
            self._turn(min(left, max(0.0, self._deadline - monotonic()), _LOOK_S))
        replied, self._replied = self._replied, []
        return replied

    def close(self) -> None:
        """End the processes; unfinished calls are lost. May be called twice."""
        processes = [seat.process for seat in self._seats if seat.process is not None]
        self._listener.close(processes, lambda process: bool(process.pending))
        for seat in self._seats:
            seat.process = None

    def _seat(self, episode: str) -> _Seat:
        return self._seats[crc32(episode.encode()) % len(self._seats)]

    @property
    def _deadline(self) -> float:
        """The next time at which somebody has waited for too long."""
        processes = [seat.process for seat in self._seats if seat.process is not None]
        calls = [call.deadline for process in processes for call in process.pending.values()]
        return min([*calls, *(process.deadline for process in processes)], default=inf)

    def _turn(self, timeout_s: float) -> None:
        """Read every answer that is there, waiting so long for the first; then judge; then send."""
        self._excuse(monotonic() - self._looked_at)
        self._listener.listen(timeout_s)
        for seat in self._seats:
            self._judge(seat)
            self._fill(seat)
        self._looked_at = monotonic()

    def _excuse(self, away_s: float) -> None:
        """Calls do not pay for a time in which nobody looked: their answers may have waited for it."""
        if away_s > _AWAY_S:
            for process in [seat.process for seat in self._seats if seat.process is not None]:
                process.heard_at += away_s
                for call in process.pending.values():
                    call.deadline += away_s

    def _judge(self, seat: _Seat) -> None:
        """End a process in which a call takes too long; the others in it are asked again.

        Where a process does not even give a sign of life, any of its calls may be the one that keeps the interpreter to
        itself.
        """
        process, now = seat.process, monotonic()
        if process is None:
            return
        late = [call for call in process.pending.values() if call.deadline < now]
        if late and len(process.pending) > 1 and now - process.heard_at > _SILENT_S:
            seat.suspects.extend(process.pending.values())
            self._end(process)
        elif late:
            for call in late:
                del process.pending[call.ask.number]
                self._settle(call, failure=f"it took longer than {self._timeout_s:g} s")
            others = list(process.pending.values())
            self._end(process)
            seat.waiting.extendleft(reversed(others))
        elif process.deadline < now:
            self._end(process)
            raise EpisodeError(f"an environment's process did not start: it was not ready after {START_TIMEOUT_S:g} s")

    def _fill(self, seat: _Seat) -> None:
        if seat.process is None and (seat.waiting or seat.suspects):
            self._start(seat)
        process = seat.process
        if process is None or not process.is_ready or not self._flush(process):
            return
        while (call := seat.next_call()) is not None:
            call.sent_at = monotonic()
            call.deadline = call.sent_at + self._timeout_s + GRACE_S
            process.pending[call.ask.number] = call
            process.put(call.ask)
        self._flush(process)

    def _start(self, seat: _Seat) -> None:
        try:
            seat.process = _Process(self._setup, seat)
        except OSError as error:
            self._count_failure(seat, str(error))
            return
        self._listener.add(seat.process)

    def _count_failure(self, seat: _Seat, reason: str) -> None:
        seat.num_failed += 1
        if seat.num_failed >= _MOST_STARTS:
            raise EpisodeError(f"an environment's process did not start: {reason}")

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

    def _take(self, process: _Process, message: Ready | ReplyLine) -> None:
        process.heard_at = monotonic()
        if isinstance(message, Ready):
            if message.failure:
                raise EpisodeError(f"environment: its process cannot import it: {message.failure}")
            process.is_ready, process.deadline, process.seat.num_failed = True, inf, 0
            return
        call = process.pending.pop(message.number, None)
        if call is None:
            raise StrayBytesError
        reply = Reply(content=message.content, reward=message.reward, done=message.done, metrics=message.metrics)
        self._settle(call, reply=None if message.failure else reply, failure=message.failure)

    def _settle(self, call: _Call, *, reply: Reply | None = None, failure: str = "") -> None:
        if self._current.get(call.ask.episode) == call.ask.number:  # else nobody wants it any more
            del self._current[call.ask.episode]
            now = monotonic()
            waited_s, took_s = now - call.asked_at, now - call.sent_at
            self._replied.append(Replied(call.ask.episode, reply, failure, waited_s, time(), took_s))

    def _lose(self, process: _Process, message: str = "") -> None:
        """A process has died: the call that it was at is settled, or each of several is asked again alone."""
        ending, seat = self._end(process), process.seat
        calls = list(process.pending.values())
        if not process.is_ready:
            self._count_failure(seat, ending)
        elif len(calls) == 1:
            self._settle(calls[0], failure=message or ending)
        else:
            seat.suspects.extend(calls)

    def _end(self, process: _Process) -> str:
        process.seat.process = None
        return self._listener.end(process)
