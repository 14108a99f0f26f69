"""A pool of reward processes that survives reward functions which raise, hang or kill their process.

There is no thread: calls of `poll` and `drain` move work out and answers in.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import fields
from time import monotonic
from typing import Any, Literal, NamedTuple

from rhymerl.errors import RewardError
from rhymerl.rewards.base import Reward
from rhymerl.rewards.calls import Call
from rhymerl.rewards.lines import Outcome, StrayBytesError
from rhymerl.rewards.process import GRACE_S, ChildProcess, ProcessPool
from rhymerl.rewards.process_main import Chunk

_POLL_INTERVAL_S = 0.01


class PendingCall(NamedTuple):
    """One call to make: of reward number `reward`, for whatever its caller knows by `key`."""

    reward: int
    key: Any
    call: Call


class _PooledProcess(ChildProcess):
    """A reward process, and the chunk that it is at."""

    pending: dict[int, PendingCall]  # by position in the chunk; the first is the one being run

    def __init__(self, settings: Sequence[Mapping[str, Any]]) -> None:
        super().__init__("rhymerl.rewards.process_main", settings)
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


class RewardPool(ProcessPool[_PooledProcess]):
    """Runs calls of `rewards` in processes, in chunks; `deliver(reward, key, outcome)` gets each outcome once.

    A call that hangs or kills its process costs that one sample; the rest of its chunk runs again. If calls run at the
    same time (async or batch), the guilty one is found by running each again alone. Processes start with the first
    work, and again where that fails. `poll`, `flush` and `drain` raise RewardError when a process cannot work at all.
    """

    error = RewardError
    name = "a reward process"
    asked_for = "result"
    shares_work = True

    def __init__(
        self,
        rewards: Sequence[Reward],
        deliver: Callable[[Reward, Any, Outcome], None],
        *,
        num_processes: int,
        chunk_size: int,
    ) -> None:
        settings = [_settings_of(reward) for reward in rewards]
        super().__init__([_PooledProcess(settings) for _ in range(num_processes)])
        self.rewards = rewards
        self._deliver = deliver
        self._chunk_size = chunk_size
        self._queues: list[deque[PendingCall]] = [deque() for _ in rewards]
        self._alone: deque[PendingCall] = deque()
        self._next_poll = 0.0

    def put(self, call: PendingCall) -> None:
        """Queue a call; nothing is sent yet."""
        self._queues[call.reward].append(call)

    def poll(self) -> None:
        """Flush when a chunk is full or some time has passed: cheap enough to be called for every sample."""
        if self._num_queued >= self._chunk_size or monotonic() >= self._next_poll:
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
            deadlines = [each.deadline for each in self._processes if each.is_running and not each.is_idle]
            if self._lacks_processes:
                deadlines.append(min(each.start_not_before for each in self._processes if not each.is_running))
            self._turn(max(0.0, min(deadlines) - monotonic()))

    def _turn(self, timeout_s: float) -> None:
        """Read every answer that is there, waiting up to `timeout_s` for the first; then judge; then send."""
        self._listen(timeout_s)
        now = monotonic()
        for process in [each for each in self._processes if each.pending and each.deadline < now]:
            self._end(process)
            limit_s = self.rewards[next(iter(process.pending.values())).reward].timeout_s
            self._lose_calls(process, f"it hung for longer than {limit_s:g} s", kind="timeout")
        self._dispatch()

    def _dispatch(self) -> None:
        """Give work to idle processes, and start processes while there is more."""
        for process in self._processes:
            if process.is_idle and (calls := self._next_chunk()):
                self._send(process, calls)
        for process in self._processes:
            if not process.is_running and self._lacks_processes and monotonic() >= process.start_not_before:
                self._start(process)

    @property
    def _num_queued(self) -> int:
        return sum(map(len, self._queues), len(self._alone))

    @property
    def _lacks_processes(self) -> bool:
        running = [process for process in self._processes if process.is_running]
        num_starting = sum(not process.is_ready for process in running)
        return num_starting < self._num_queued and len(running) < len(self._processes)

    def _next_chunk(self) -> list[PendingCall]:
        """Calls of the reward with the longest queue: an equal share for each process when few are left."""
        if self._alone:
            return [self._alone.popleft()]
        queue = max(self._queues, key=len)
        size = min(self._chunk_size, len(queue))
        if queue and not _is_concurrent(self.rewards[queue[0].reward]):
            size = min(size, -(-len(queue) // len(self._processes)))
        return [queue.popleft() for _ in range(size)]

    def _send(self, process: _PooledProcess, calls: Sequence[PendingCall]) -> None:
        reward = self.rewards[calls[0].reward]
        try:
            process.send(calls, reward)
        except OSError:
            self._lose(process)
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise RewardError(f"{reward.setting}: its columns cannot be sent to a reward process: {error}") from error

    def _take(self, process: _PooledProcess, outcome: Outcome) -> None:
        expected = list(process.pending)[:1] if process.in_order else process.pending
        if outcome.number not in expected or type(outcome.value) is not float:
            raise StrayBytesError
        call = process.pending.pop(outcome.number)
        if process.in_order:
            process.deadline = outcome.finished_at + self.rewards[call.reward].timeout_s + GRACE_S
        if outcome.kind == "again":
            self._alone.append(call)
        else:
            self._deliver(self.rewards[call.reward], call.key, outcome)

    def _lose_calls(
        self, process: _PooledProcess, message: str, *, kind: Literal["crash", "timeout"] = "crash"
    ) -> None:
        """The guilty call is settled, the others are queued again."""
        if not process.pending:
            return
        guilty, *others = process.pending.values()
        process.pending = {}
        if others and not process.in_order:
            self._alone.extend([guilty, *others])
            return
        self._queues[guilty.reward].extendleft(reversed(others))
        self._deliver(self.rewards[guilty.reward], guilty.key, Outcome(0, kind, message=message))


def _is_concurrent(reward: Reward) -> bool:
    return reward.batch or reward.is_async


def _settings_of(reward: Reward) -> dict[str, Any]:
    """Return a reward's settings; a function is replaced by module and name, by which another process imports it."""
    assert reward.home is not None, "a pooled reward can be imported"
    settings = {each.name: getattr(reward, each.name) for each in fields(Reward) if each.init}
    return settings if isinstance(reward.function, str) else settings | {"function": reward.home[:2]}
