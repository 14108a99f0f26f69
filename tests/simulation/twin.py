"""A simulator that counts single passes: slow, obvious, and without a line of the real one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

COST = 1 / 128  # of a token; a pass costs 1 besides


@dataclass(slots=True)
class Worker:
    """Requests as [name, tokens left], in order."""

    free: float  # the end of its last pass
    waiting: list[list[int]] = field(default_factory=list)
    running: list[list[int]] = field(default_factory=list)
    ends: dict[int, float] = field(default_factory=dict)

    def decode(self, max_running: int | None) -> None:
        """All passes until nothing is left."""
        while self.waiting or self.running:
            while self.waiting and (max_running is None or len(self.running) < max_running):
                self.running.append(self.waiting.pop(0))
            self.free += 1 + COST * len(self.running)
            for request in self.running:
                request[1] -= 1
                if request[1] == 0:
                    self.ends[request[0]] = self.free
            self.running = [request for request in self.running if request[1]]


def decoded(start: float, lengths: Sequence[int], max_running: int | None = None) -> tuple[float, list[float]]:
    """When a queue is done, and each of its requests."""
    worker = Worker(start, [[name, length] for name, length in enumerate(lengths)])
    worker.decode(max_running)
    return worker.free, [worker.ends[name] for name in range(len(lengths))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ends:
    """The end of each step."""

    done: list[float]  # the last worker has finished
    starts: list[list[float]]  # [S][W]
    ends: list[list[float]]  # [S][W]


def pipelined(plans: Sequence[Sequence[Sequence[int]]], *, run_ahead: str, train_time: float = 0.0) -> Ends:
    """Run disaggregated steps of queues, off or keep; a `keep` step waits for the training of the last but one."""
    found = Ends(done=[], starts=[], ends=[])
    trained: list[float] = []
    free = [0.0] * len(plans[0])
    for step, queues in enumerate(plans):
        needed = step - (2 if run_ahead == "keep" else 1)
        opened = trained[needed] if needed >= 0 else 0.0
        starts = [max(each, opened) for each in free]
        free = [decoded(start, queue)[0] for start, queue in zip(starts, queues, strict=True)]
        found.starts.append(starts)
        found.ends.append(free)
        found.done.append(max(free))
        trained.append(max(found.done[-1], trained[-1] if trained else 0.0) + train_time)
    return found
