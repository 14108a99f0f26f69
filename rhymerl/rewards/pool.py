"""A pool of reward processes that survives reward functions which raise, hang or kill their process.

There is no thread: calls of `poll` and `drain` move work out and answers in.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Container, Sequence
from dataclasses import KW_ONLY, dataclass
from time import monotonic
from typing import Any, Literal, NamedTuple

from rhymerl.errors import RewardError
from rhymerl.rewards.base import Reward
from rhymerl.rewards.calls import Call, Outcome
from rhymerl.rewards.lines import Ready, StrayBytesError, parser_of
from rhymerl.rewards.process import GRACE_S, START_TIMEOUT_S, ChildProcess, Listener
from rhymerl.rewards.process_main import Chunk, FunctionSpec

_START_AGAIN_AFTER_S = (0.1, 0.3, 0.9, 2.7)  # as starts fail while the machine has too many processes
_POLL_INTERVAL_S = 0.01


class PendingCall(NamedTuple):
    """One call to make: of reward number `reward`, for whatever its caller knows by `key`."""

    reward: int
    key: Any
    call: Call


class _PooledProcess(ChildProcess):
    """A reward process, and the chunk that it is at."""

    def __init__(self, specs: Sequence[FunctionSpec]) -> None:
        super().__init__("rhymerl.rewards.process_main", list(specs), parser_of(Outcome))
        self.pending: dict[int, PendingCall] = {}  # by position in the chunk; the first is the one being run
        self.in_order = True

    @property
    def is_idle(self) -> bool:
        return self.is_ready and not self.pending

    def send(self, calls: Sequence[PendingCall], reward: Reward) -> None:
        """Raises OSError when the process is dead."""
        self.pending = dict(enumerate(calls))
        self.in_order = not _is_concurrent(reward)
        num_limits = len(calls) if reward.batch else 1
        self.connection.send_bytes(pickle.dumps(Chunk(calls[0].reward, [each.call for each in calls])))
        self.deadline = monotonic() + reward.timeout_s * num_limits + GRACE_S


@dataclass(eq=False)
class RewardPool:
    """Runs calls of `rewards` in processes, in chunks; `deliver(reward, key, outcome)` gets each outcome once.

    A call that hangs or kills its process costs that one sample; the rest of its chunk runs again. If calls run at the
    same time (async or batch), the guilty one is found by running each again alone. Processes start with the first
    work, and again where that fails. `poll`, `flush` and `drain` raise RewardError when a process cannot work at all.
    """

    rewards: Sequence[Reward]
    deliver: Callable[[Reward, Any, Outcome], None]
    _: KW_ONLY
    num_processes: int = 2
    chunk_size: int = 16

    def __post_init__(self) -> None:
        self._specs = [_spec(reward) for reward in self.rewards]
        self._queues: list[deque[PendingCall]] = [deque() for _ in self.rewards]
        self._alone: deque[PendingCall] = deque()
        self._processes: list[_PooledProcess] = []
        self._num_failed_starts = 0  # since one succeeded
        self._start_not_before = 0.0
        self._listener = Listener(self._take, self._lose, asked_for="result")
        self._next_poll = 0.0

    def put(self, call: PendingCall) -> None:
        """Queue a call; nothing is sent yet."""
        self._queues[call.reward].append(call)

    def poll(self) -> None:
        """Flush when a chunk is full or some time has passed: cheap enough to be called for every sample."""
        if self._num_queued >= self.chunk_size or monotonic() >= self._next_poll:
            self.flush()

    def flush(self) -> None:
        """Receive and send what can be without waiting."""
        self._next_poll = monotonic() + _POLL_INTERVAL_S
        self._turn(0.0)

    def discard(self, keys: Container[Any]) -> None:
        """Forget calls with these keys that have not been sent yet."""
        for queue in (*self._queues, self._alone):
            left = [call for call in queue if call.key not in keys]
            queue.clear()
            queue.extend(left)

    def drain(self, until: Callable[[], bool]) -> None:
        """Return when that holds, which queued calls and their outcomes have to bring about."""
        self._dispatch()
        while not until():
            deadlines = [process.deadline for process in self._processes if not process.is_idle]
            if self._lacks_processes:
                deadlines.append(self._start_not_before)
            self._turn(max(0.0, min(deadlines) - monotonic()))

    def close(self) -> None:
        """End the processes, at once where they are busy; unfinished work is lost."""
        self._listener.close(self._processes, lambda process: not process.is_idle)
        self._processes.clear()

    def _turn(self, timeout_s: float) -> None:
        """Read every answer that is there, waiting up to `timeout_s` for the first; then judge; then send."""
        self._listener.listen(timeout_s)
        now = monotonic()
        for process in [each for each in self._processes if not each.is_idle and each.deadline < now]:
            self._lose(process, kind="timeout")
        self._dispatch()

    def _dispatch(self) -> None:
        """Give work to idle processes, and start processes while there is more."""
        for process in [each for each in self._processes if each.is_idle]:
            if calls := self._next_chunk():
                self._send(process, calls)
        while self._lacks_processes and monotonic() >= self._start_not_before:
            self._start()

    @property
    def _num_queued(self) -> int:
        return sum(map(len, self._queues), len(self._alone))

    @property
    def _lacks_processes(self) -> bool:
        num_starting = sum(not process.is_ready for process in self._processes)
        return num_starting < self._num_queued and len(self._processes) < self.num_processes

    def _next_chunk(self) -> list[PendingCall]:
        """Calls of the reward with the longest queue: an equal share for each process when few are left."""
        if self._alone:
            return [self._alone.popleft()]
        queue = max(self._queues, key=len)
        size = min(self.chunk_size, len(queue))
        if queue and not _is_concurrent(self.rewards[queue[0].reward]):
            size = min(size, -(-len(queue) // self.num_processes))
        return [queue.popleft() for _ in range(size)]

    def _send(self, process: _PooledProcess, calls: Sequence[PendingCall]) -> None:
        reward = self.rewards[calls[0].reward]
        try:
            process.send(calls, reward)
        except OSError:
            self._lose(process)
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise RewardError(f"{reward.setting}: its columns cannot be sent to a reward process: {error}") from error

    def _take(self, process: _PooledProcess, outcome: Ready | Outcome) -> None:
        if process.is_ready == isinstance(outcome, Ready):
            raise StrayBytesError
        if isinstance(outcome, Ready):
            if outcome.failure:
                raise RewardError(outcome.failure)
            process.is_ready = True
            self._num_failed_starts = 0
            return
        expected = list(process.pending)[:1] if process.in_order else process.pending
        if outcome.position not in expected:
            raise StrayBytesError
        call = process.pending.pop(outcome.position)
        if process.in_order:
            process.deadline = outcome.finished_at + self.rewards[call.reward].timeout_s + GRACE_S
        if outcome.kind == "again":
            self._alone.append(call)
        else:
            self.deliver(self.rewards[call.reward], call.key, outcome)

    def _lose(self, process: _PooledProcess, message: str = "", *, kind: Literal["crash", "timeout"] = "crash") -> None:
        """End a process that hangs or has died: the guilty call is settled, the others are queued again."""
        self._processes.remove(process)
        ending = self._listener.end(process)
        if not process.is_ready:
            if kind == "timeout":
                raise RewardError(f"a reward process did not start: it was not ready after {START_TIMEOUT_S:g} s")
            self._start_later(ending)
        if not process.pending:
            return
        guilty, *others = process.pending.values()
        if others and not process.in_order:
            self._alone.extend([guilty, *others])
            return
        self._queues[guilty.reward].extendleft(reversed(others))
        if kind == "timeout":
            message = f"it hung for longer than {self.rewards[guilty.reward].timeout_s:g} s"
        self.deliver(self.rewards[guilty.reward], guilty.key, Outcome(0, kind, message=message or ending))

    def _start(self) -> None:
        try:
            process = _PooledProcess(self._specs)
        except OSError as error:
            self._start_later(str(error))
            return
        self._processes.append(process)
        self._listener.add(process)

    def _start_later(self, reason: str) -> None:
        """Let some time pass after a failed start. Raises RewardError when too many failed and nobody is at work."""
        last = len(_START_AGAIN_AFTER_S) - 1
        if self._num_failed_starts > last and not any(process.is_ready for process in self._processes):
            raise RewardError(f"a reward process did not start: {reason}")
        self._start_not_before = monotonic() + _START_AGAIN_AFTER_S[min(self._num_failed_starts, last)]
        self._num_failed_starts += 1


def _is_concurrent(reward: Reward) -> bool:
    return reward.batch or reward.is_async


def _spec(reward: Reward) -> FunctionSpec:
    assert reward.home is not None, "a pooled reward can be imported"
    return FunctionSpec(
        reward=reward.name,
        module=reward.home.module,
        qualname=reward.home.qualname,
        batch=reward.batch,
        is_async=reward.is_async,
        timeout_s=reward.timeout_s,
        arguments=reward.arguments,
    )
