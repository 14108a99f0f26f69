"""One rank's part of a step: it decodes its queue, and then that of the following step until all ranks are done."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rhymerl.backends.base import RolloutBackend
from rhymerl.distributed import Parcel
from rhymerl.errors import BackendError
from rhymerl.rollout.ahead import Drawn
from rhymerl.rollout.conductor import Report
from rhymerl.types import Completion, RolloutRequest

if TYPE_CHECKING:
    from rhymerl.types import IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How long a backend decodes between two exchanges with the other ranks; without either limit until something has ended."""

    timeout_s: float | None = None
    max_passes: int | None = None
    report_every_s: float | None = None  # how often rank 0 hears how far the answers are, if it is to know at all


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """A request on its way to another rank, which knows it by its place in the step's list, with what it has drawn."""

    place: int
    drawn: Drawn
    ahead: IntArray | None  # the request's draft of the whole answer


class Part:
    """Decodes `queue`, whose answers are `drawn` in part, by request id; `requests` are the step's, of all ranks."""

    def __init__(
        self,
        backend: RolloutBackend,
        queue: Sequence[RolloutRequest],
        *,
        requests: Sequence[RolloutRequest],
        drawn: Mapping[str, Drawn],
        pace: Pace,
    ) -> None:
        self.busy_s = 0.0
        self._backend = backend
        self._requests = requests
        self._places = {request.id: place for place, request in enumerate(requests)}
        self._pace = pace
        self._drawn = dict(drawn)
        self._unfinished: dict[str, RolloutRequest] = {}
        self._ended: list[Completion] = []  # not handed over yet
        self._finished: list[int] = []  # not reported yet
        self._reported_at = 0.0
        self._parcels: list[Parcel] = []
        self._following: list[RolloutRequest] | None = None  # the queue of the following step, until it is begun
        self._ahead_of: dict[str, RolloutRequest] = {}  # of the following step, in the backend
        self._ahead: dict[str, Drawn] = {}  # of the following step, ended
        self._enter(queue)

    # -- decoding ------------------------------------------------------------------------------------------------

    @property
    def is_busy(self) -> bool:
        """Whether there is something to decode."""
        return bool(self._unfinished or self._ahead_of or self._following)

    def decode(self) -> list[Completion]:
        """For a while; returns answers of the step that have ended."""
        if self._following and not self._unfinished:
            following, self._following = self._following, None
            self._begin(following)
        if self._unfinished or self._ahead_of:
            self._collect()
        ended, self._ended = self._ended, []
        return ended

    def _collect(self) -> None:
        started = time.perf_counter()
        found = self._backend.collect(self._pace.timeout_s, max_passes=self._pace.max_passes)
        seconds = time.perf_counter() - started
        self.busy_s += seconds
        if not found and not self._may_find_nothing(seconds):
            lost = len(self._unfinished) + len(self._ahead_of)
            raise BackendError(f"{type(self._backend).__name__} lost {lost} requests")
        for completion in found:
            self._take(completion)

    def _may_find_nothing(self, seconds: float) -> bool:
        """Whether the time was over, or the passes were done with work left."""
        waited = self._pace.timeout_s is not None and seconds >= self._pace.timeout_s
        return waited or (self._pace.max_passes is not None and bool(self._backend.progress()))

    def _whole(self, completion: Completion) -> Completion:
        """With what it had cost before it came here, or was taken back."""
        before = self._drawn.pop(completion.request.id, None)
        return before.before(completion) if before is not None else completion

    def _take(self, completion: Completion) -> None:
        name, completion = completion.request.id, self._whole(completion)
        if name in self._unfinished:
            del self._unfinished[name]
            self._ended.append(completion)
            self._finished.append(self._places[name])
        elif name in self._ahead_of:
            del self._ahead_of[name]
            self._ahead[name] = Drawn.of(completion)
        else:
            raise BackendError(f"{type(self._backend).__name__} gave the answer to {name} twice, or unasked")

    def _enter(self, requests: Sequence[RolloutRequest]) -> None:
        """Requests of the step: those whose answers had ended are answered, others go on from what they have."""
        for request in requests:
            drawn = self._drawn.get(request.id)
            self._unfinished[request.id] = request
            if drawn is not None and drawn.has_ended:
                self._drawn.pop(request.id)
                self._take(drawn.completion(request))
        self._submit([request for request in requests if request.id in self._unfinished])

    def _submit(self, requests: Sequence[RolloutRequest]) -> None:
        """Each goes on from what it has."""
        self._backend.submit([_going_on(request, self._drawn.get(request.id)) for request in requests])

    # -- with the other ranks --------------------------------------------------------------------------------------

    def report(self) -> Report | None:
        """What is new for rank 0, None when nothing is."""
        now, every_s = time.monotonic(), self._pace.report_every_s
        tells_tokens = every_s is not None and bool(self._unfinished) and now - self._reported_at >= every_s
        if not self._finished and not tells_tokens:
            return None
        tokens: dict[int, int] = {}
        if tells_tokens:
            self._reported_at = now
            drawn = self._backend.progress()
            tokens = {self._places[name]: drawn[name] for name in self._unfinished if name in drawn}
        report = Report(finished=tuple(self._finished), tokens=tokens)
        self._finished = []
        return report

    def give_away(self, moves: Mapping[int, int]) -> None:
        """Take back those of these requests that are here and not finished; `parcels` then has them, for their new rank."""
        names = [name for name in self._unfinished if self._places[name] in moves]
        for completion in self._backend.withdraw(names) if names else []:
            name = completion.request.id
            place, ahead = self._places[name], self._unfinished.pop(name).ahead
            moved = Moved(place=place, drawn=Drawn.of(self._whole(completion)), ahead=ahead)
            self._parcels.append(Parcel(to=moves[place], value=moved))

    def parcels(self) -> list[Parcel]:
        """What is to be sent to other ranks now."""
        parcels, self._parcels = self._parcels, []
        return parcels

    def receive(self, moved: Sequence[Moved]) -> None:
        """Go on with requests of other ranks, in front of what is drawn ahead."""
        if not moved:
            return
        waits = dict(self._ahead_of)
        for completion in self._backend.withdraw(list(waits)) if waits else []:
            self._take(completion)
        requests = [replace(self._requests[each.place], ahead=each.ahead) for each in moved]
        self._drawn |= {request.id: each.drawn for request, each in zip(requests, moved, strict=True)}
        self._enter(requests)
        goes_on = [name for name in waits if not self._ahead[name].has_ended]
        self._drawn |= {name: self._ahead.pop(name) for name in goes_on}
        self._begin([waits[name] for name in goes_on])

    # -- the following step ----------------------------------------------------------------------------------------

    def run_ahead(self, queue: Sequence[RolloutRequest]) -> None:
        """From when nothing of this step is left here, decode the queue of the following one."""
        self._following = list(queue)

    def _begin(self, requests: Sequence[RolloutRequest]) -> None:
        self._ahead_of |= {request.id: request for request in requests}
        self._submit(requests)

    def pause(self) -> dict[str, Drawn]:
        """All ranks are done with the step: what has been drawn for the following one; the backend is empty then."""
        for completion in self._backend.withdraw() if self._ahead_of else []:
            self._take(completion)
        return {name: drawn for name, drawn in self._ahead.items() if _has_any(drawn)}


def _going_on(request: RolloutRequest, drawn: Drawn | None) -> RolloutRequest:
    return replace(request, generated=drawn.generated) if drawn is not None and len(drawn.generated) else request


def _has_any(drawn: Drawn) -> bool:
    return drawn.has_ended or len(drawn.generated) > 0
