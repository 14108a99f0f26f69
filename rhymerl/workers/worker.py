"""A worker answers a queue of requests, and then begins that of the following step until all workers are done."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rhymerl.backends.base import RolloutBackend
from rhymerl.backends.spans import EVALUATION, SpanLog
from rhymerl.distributed import Message
from rhymerl.errors import BackendError
from rhymerl.history import HistoryStore
from rhymerl.types import Completion, Output, RolloutRequest, Sample
from rhymerl.workers.coordinator import ProgressReport

if TYPE_CHECKING:
    from torch import Tensor

    from rhymerl.types import IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeLimits:
    """The limits of decoding between two exchanges with other workers; without either one it lasts until a request has ended."""

    timeout_s: float | None = None
    max_passes: int | None = None
    report_every_s: float | None = None  # how often rank 0 hears how far the answers are, if it is to know at all


@dataclass(frozen=True, slots=True, kw_only=True)
class MovedRequest:
    """A request on its way to another worker, with its output so far; both know it by its index in the step's list."""

    index: int
    output: Output
    prefetched: IntArray | None  # the request's draft of the whole answer


class Worker:
    """An engine as the rollout loop sees it: all that is asked of one, wherever it lives.

    It goes on with requests (`begin_step`, `decode`, `receive`, `run_ahead`), says how far it is (`report`), gives requests back (`give_back`,
    `pause`), and takes new weights and what its drafter is to learn. This one drives a backend in its own process.
    """

    def __init__(self, backend: RolloutBackend, *, number: int = 0) -> None:
        self.spans = SpanLog(number)
        self.counts_passes = backend.counts_passes
        self.name = type(backend).__name__
        self._backend = backend
        self.begin_step([], requests=[], outputs={}, limits=DecodeLimits())

    def begin_step(
        self,
        queue: Sequence[RolloutRequest],
        *,
        requests: Sequence[RolloutRequest],
        outputs: Mapping[str, Output],
        limits: DecodeLimits,
        step: int = EVALUATION,
    ) -> None:
        """Begin a step with its share of the step's `requests`.

        `outputs` are what there is of these answers already, by request id.
        """
        self.busy_s = 0.0
        self._step = step
        self._requests = requests
        self._index = {request.id: index for index, request in enumerate(requests)}
        self._limits = limits
        self._unfinished: dict[str, RolloutRequest] = {}
        self._completed: list[Completion] = []  # not handed over yet
        self._finished: list[int] = []  # not reported yet
        self._reported_at = 0.0
        self._messages: list[Message] = []
        self._following: list[RolloutRequest] | None = None  # the queue of the following step, until it is begun
        self._prefetching: dict[str, RolloutRequest] = {}  # of the following step, in the backend
        self._prefetched: dict[str, Output] = {}  # of the following step, no longer in the backend
        self._go_on([(request, outputs.get(request.id)) for request in queue])

    # -- between steps -------------------------------------------------------------------------------------------

    def sync_weights(self, named_tensors: Iterable[tuple[str, Tensor]], policy_version: int) -> None:
        """Sample with these weights from now on."""
        started = time.perf_counter()
        self._backend.sync_weights(named_tensors, policy_version)
        self.spans.note("weights", policy_version, seconds=time.perf_counter() - started)

    def learn(self, samples: Sequence[Sample]) -> None:
        """Let the drafter learn from the scored answers of a step, in canonical order."""
        self._backend.learn(samples)

    def follow(self, history: HistoryStore) -> None:
        """Let the drafter know what is new in the history."""
        self._backend.follow(history)

    def sleep(self) -> None:
        """Give memory back until the next step, if that is wanted."""
        self._backend.sleep()

    def metrics(self) -> Mapping[str, float]:
        """Return what happened in the engine since the last call, by metric name."""
        return self._backend.metrics()

    # -- decoding ------------------------------------------------------------------------------------------------

    @property
    def is_busy(self) -> bool:
        """Return whether there is something to decode."""
        return bool(self._unfinished or self._prefetching or self._following)

    def decode(self) -> list[Completion]:
        """Decode for a while; returns the answers of the step that have ended."""
        if self._following and not self._unfinished:
            following, self._following = self._following, None
            self._prefetch([(request, None) for request in following])
        if self._unfinished or self._prefetching:
            self._collect()
        completed, self._completed = self._completed, []
        return completed

    def _collect(self) -> None:
        started, is_ahead = time.perf_counter(), not self._unfinished
        found = self._backend.collect(self._limits.timeout_s, max_passes=self._limits.max_passes)
        seconds = time.perf_counter() - started
        self.busy_s += seconds
        self.spans.note("decode", self._step + is_ahead, seconds=seconds)
        if not found and not self._may_find_nothing(seconds):
            lost = len(self._unfinished) + len(self._prefetching)
            raise BackendError(f"{self.name} lost {lost} requests")
        for completion in found:
            self._take(completion)

    def _may_find_nothing(self, seconds: float) -> bool:
        """Return whether the time was over, or the passes were done with work left."""
        waited = self._limits.timeout_s is not None and seconds >= self._limits.timeout_s
        return waited or (self._limits.max_passes is not None and bool(self._backend.progress()))

    def _take(self, completion: Completion) -> None:
        name = completion.request.id
        if name in self._unfinished:
            del self._unfinished[name]
            self._completed.append(completion)
            self._finished.append(self._index[name])
        elif name in self._prefetching:
            del self._prefetching[name]
            self._prefetched[name] = completion.output
        else:
            raise BackendError(f"{self.name} gave the answer to {name} twice, or unasked")

    def _go_on(self, requests: Sequence[tuple[RolloutRequest, Output | None]]) -> None:
        """Take on requests of the step: those whose answers have ended are done, others go on from what they have."""
        self._unfinished |= {request.id: request for request, _ in requests}
        for request, output in requests:
            if output is not None and output.is_finished:
                self._take(Completion(request=request, output=output))
        self._submit([(request, output) for request, output in requests if request.id in self._unfinished])

    def _submit(self, requests: Sequence[tuple[RolloutRequest, Output | None]]) -> None:
        if requests:
            self._backend.submit(
                [replace(request, output=output) if output else request for request, output in requests]
            )

    # -- with the other workers ------------------------------------------------------------------------------------

    def report(self) -> ProgressReport | None:
        """Return what is new for the coordinator, or None when nothing is."""
        now, every_s = time.monotonic(), self._limits.report_every_s
        tells_tokens = every_s is not None and bool(self._unfinished) and now - self._reported_at >= every_s
        if not self._finished and not tells_tokens:
            return None
        tokens: dict[int, int] = {}
        if tells_tokens:
            self._reported_at = now
            progress = self._backend.progress()
            tokens = {self._index[name]: progress[name] for name in self._unfinished if name in progress}
        report = ProgressReport(finished=tuple(self._finished), tokens=tokens)
        self._finished = []
        return report

    def give_back(self, moves: Mapping[int, int]) -> None:
        """Withdraw those of these requests that are here and not finished; `messages` then has them, for their new worker."""
        names = [name for name in self._unfinished if self._index[name] in moves]
        for completion in self._backend.withdraw(names) if names else []:
            name = completion.request.id
            index, prefetched = self._index[name], self._unfinished.pop(name).prefetched
            moved = MovedRequest(index=index, output=completion.output, prefetched=prefetched)
            self._messages.append(Message(to=moves[index], value=moved))

    def messages(self) -> list[Message]:
        """Return what is to be sent to other workers now."""
        messages, self._messages = self._messages, []
        return messages

    def receive(self, moved: Sequence[MovedRequest]) -> None:
        """Go on with requests of other workers, before the following step's, which are being prefetched."""
        if not moved:
            return
        waiting = dict(self._prefetching)
        for completion in self._backend.withdraw(list(waiting)) if waiting else []:
            self._take(completion)
        self._go_on([(replace(self._requests[each.index], prefetched=each.prefetched), each.output) for each in moved])
        unfinished = [name for name in waiting if not self._prefetched[name].is_finished]
        self._prefetch([(waiting[name], self._prefetched.pop(name)) for name in unfinished])

    # -- the following step ----------------------------------------------------------------------------------------

    def run_ahead(self, queue: Sequence[RolloutRequest]) -> None:
        """Decode the queue of the following step as soon as nothing of this step is left here."""
        self._following = list(queue)

    def _prefetch(self, requests: Sequence[tuple[RolloutRequest, Output | None]]) -> None:
        self._prefetching |= {request.id: request for request, _ in requests}
        self._submit(requests)

    def pause(self) -> dict[str, Output]:
        """End the step: empty the backend and return the outputs prefetched for the following one. Called when all workers are done."""
        for completion in self._backend.withdraw() if self._prefetching else []:
            self._take(completion)
        return {name: output for name, output in self._prefetched.items() if output.is_finished or len(output)}
