"""The host of a worker's engine: the life of a request, from where it is given to a worker to where its answer leaves it.

It is the same on a trainer's rank, which steps its host itself (`ranks`), and in a worker apart from it, which is told by messages
(`remote/host`). A request is `submit`ted and waits. `decode` hands the engine those that go first, and takes what has ended. Others
wait with what they have: behind earlier steps, or, as a draft, for the policy that is to sample them. `withdraw` gives them back.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from rhymerl.backends.base import RolloutBackend
from rhymerl.backends.spans import SpanLog
from rhymerl.errors import BackendError
from rhymerl.types import Completion, Output, RolloutRequest
from rhymerl.workers.versions import Versions


@dataclass(slots=True, kw_only=True)
class Task:
    """A request that is not answered yet."""

    request: RolloutRequest
    priority: int  # the lowest goes first
    versions: Versions
    is_running: bool = False  # in the engine
    output: Output | None = None  # of one that is not
    reported: int = 0  # tokens

    def known(self) -> Output:
        """What there is of one that is not in the engine."""
        return self.output or self.request.output or Output.of()

    def going_on(self) -> RolloutRequest:
        """The request as the engine gets it."""
        return replace(self.request, output=self.output) if self.output else self.request


class Host:
    """Answers requests in the order of their priorities: steps of training by number, evaluations before them.

    `beside` is how many requests of later steps run beside those of an earlier one, None: those that run already. Whoever
    has a host takes what has `finished` and what was `released` from these lists.
    """

    def __init__(
        self,
        engine: RolloutBackend | None = None,
        *,
        version: int | None = None,
        number: int = 0,
        beside: int | None = None,
    ) -> None:
        self.version = version  # of the policy that samples
        self.finished: list[Completion] = []
        self.released: list[Completion] = []
        self.spans = SpanLog(number)
        self.busy_s = 0.0
        self._backend = engine
        self._beside = beside
        self._tasks: dict[str, Task] = {}
        self._is_settled = True  # the engine has what is to be sampled now

    @property
    def engine(self) -> RolloutBackend:
        if self._backend is None:
            raise BackendError("a worker has been asked before it had weights")
        return self._backend

    @property
    def is_running(self) -> bool:
        """Return whether the engine has something to decode."""
        return any(task.is_running for task in self._tasks.values())

    @property
    def is_busy(self) -> bool:
        """Return whether there is something to decode."""
        return any(task.is_running or self._may_run(task) for task in self._tasks.values())

    # -- what it is told ---------------------------------------------------------------------------------------------

    def renew(self, version: int, load: Callable[[], RolloutBackend]) -> None:
        """Go on under a new policy, which `load` brings to the engine.

        Answers that are to be its own alone begin again, along what they have as drafts.
        """
        redone = [task for task in self._tasks.values() if task.versions.final <= version and self._has_drafts(task)]
        self._take_out([task for task in redone if task.is_running])
        for task in redone:
            if task.output:
                task.request = replace(task.request, prefetched=task.output.token_ids, output=None)
            task.output, task.reported = None, 0
        started = time.perf_counter()
        self._backend = load()
        self.version, self._is_settled = version, False
        self.spans.note("weights", version, seconds=time.perf_counter() - started)

    def submit(self, requests: Iterable[RolloutRequest], *, priority: int, versions: Versions) -> None:
        """Take requests on, in this order and behind all of a lower priority; one that has its whole answer is done."""
        self._is_settled = False
        for request in requests:
            task = self._tasks[request.id] = Task(request=request, priority=priority, versions=versions)
            if request.output is not None and request.output.is_finished:
                self._leave(task, request.output)

    def withdraw(self, names: Iterable[str]) -> None:
        """Give these requests back, as far as they are here and not answered: `released` has them, with their tokens."""
        self._is_settled = False
        tasks = [self._tasks[name] for name in names if name in self._tasks]
        self._take_out([task for task in tasks if task.is_running])
        for task in tasks:
            if self._tasks.pop(task.request.id, None) is not None:  # else it has ended meanwhile
                self.released.append(Completion(request=task.request, output=task.known()))

    # -- decoding ----------------------------------------------------------------------------------------------------

    def decode(self, timeout_s: float | None = None, max_passes: int | None = None) -> None:
        """Let the engine work for a while on what goes first: without limits until a request has ended."""
        self.settle()
        if not self.is_running:
            return
        priority, started = min(task.priority for task in self._tasks.values() if task.is_running), time.perf_counter()
        found = self.engine.collect(timeout_s, max_passes=max_passes)
        seconds = time.perf_counter() - started
        self.busy_s += seconds
        self.spans.note("decode", priority, seconds=seconds)
        is_limited = timeout_s is not None or max_passes is not None
        is_over = timeout_s is not None and seconds >= timeout_s
        if not found and not is_over and not (is_limited and self.engine.progress()):
            lost = sum(task.is_running for task in self._tasks.values())
            raise BackendError(f"{type(self.engine).__name__} lost {lost} requests")
        for completion in found:
            self._take(completion)

    def settle(self) -> None:
        """Hand over to the engine what is to be sampled now, behind what goes before it and in front of what does not."""
        if self._is_settled:
            return
        self._is_settled = True
        ready = [task for task in self._tasks.values() if task.is_running or self._may_run(task)]
        if all(task.is_running for task in ready):
            return
        ready.sort(key=lambda task: task.priority)
        num_first = sum(task.priority == ready[0].priority for task in ready)
        beside = sum(task.is_running for task in ready[num_first:]) if self._beside is None else self._beside
        chosen = ready[: num_first + beside]
        fresh = [task for task in chosen if not task.is_running]
        if not fresh:
            return
        self._take_out([task for task in ready if task.is_running and task.priority > fresh[0].priority])
        tasks = [task for task in chosen if not task.is_running and self._may_run(task)]
        for task in tasks:
            task.is_running = True
        self.engine.submit([task.going_on() for task in tasks])

    def _may_run(self, task: Task) -> bool:
        is_over = task.output is not None and task.output.is_finished  # a whole draft waits for its policy
        return self.version is not None and task.versions.oldest <= self.version and not is_over

    def _has_drafts(self, task: Task) -> bool:
        """Return whether what this policy samples of it is sampled again."""
        return self.version is not None and self.version < task.versions.final

    def _take_out(self, tasks: Sequence[Task]) -> None:
        """Withdraw running requests from the engine; those that have ended are done."""
        names = [task.request.id for task in tasks]
        for completion in self.engine.withdraw(names) if names else []:
            self._take(completion)

    def _take(self, completion: Completion) -> None:
        """Keep what there is of a request that has left the engine."""
        task = self._tasks.get(completion.request.id)
        if task is None or not task.is_running:
            name = type(self.engine).__name__
            raise BackendError(f"{name} gave the answer to {completion.request.id} twice, or unasked")
        task.is_running, self._is_settled = False, False
        self._leave(task, completion.output)

    def _leave(self, task: Task, output: Output) -> None:
        """An answer has finished, and a draft of one waits for its policy."""
        task.output = output
        if output.is_finished and not self._has_drafts(task):
            del self._tasks[task.request.id]
            self.finished.append(Completion(request=task.request, output=output))
