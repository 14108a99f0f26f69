"""The parts shared by schedulers that plan by predicted lengths."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from rhymerl.costs import Points
from rhymerl.errors import at_least, check_ranges
from rhymerl.schedulers.base import Scheduler
from rhymerl.schedulers.lengths import LengthPredictor
from rhymerl.schedulers.queue_cost import QueueCost, QueueLoad
from rhymerl.types import Output, RolloutRequest, Sample

_FASTEST = 0.1  # share of a step's episodes: these were hardly held up by others


@dataclass(kw_only=True, eq=False)
class WaitPredictor:
    """Predicts how many tokens an episode could sample while it waits for its environment, in all its turns.

    That is the unit of predicted lengths, whatever the unit of `costs` is. A prompt's seconds are the median of its
    group, moving over epochs by `momentum`. The seconds of a token come from the time between an episode's first and
    last reply in which it did not wait. So nothing is predicted before an episode with two replies has ended, and never
    for an answer of one turn, or a prompt without an answer. `max_prompts` as for LengthPredictor.
    """

    momentum: float = 0.5
    max_prompts: int = at_least(1, 1_000_000)

    def __post_init__(self) -> None:
        check_ranges(self)
        self._seconds: dict[str, float] = {}  # by key, the latest answered last
        self._token_s = 0.0  # 0: not known yet

    def predict(self, request: RolloutRequest) -> float:
        """Return the tokens that the answers to the request's prompt could sample while they wait."""
        return self._seconds.get(request.prompt.key, 0.0) / self._token_s if self._token_s else 0.0

    def learn(self, samples: Sequence[Sample]) -> None:
        """The finished answers of a step, groups whole."""
        groups: dict[str, list[float]] = defaultdict(list)
        for sample in samples:
            if turns := sample.completion.output.turns:
                groups[sample.prompt.key].append(sum(turn.waited_s for turn in turns))
        if not groups:
            return
        for key, seconds in groups.items():
            now = median(seconds)
            self._seconds[key] = self._moved(self._seconds.pop(key, now), now)
        while len(self._seconds) > self.max_prompts:
            del self._seconds[next(iter(self._seconds))]
        paces = sorted(filter(None, (_token_s(sample.completion.output) for sample in samples)))
        if paces:
            now = paces[int(_FASTEST * len(paces))]
            self._token_s = self._moved(self._token_s or now, now)

    def state_dict(self) -> dict[str, Any]:
        return {"seconds": dict(self._seconds), "token_s": self._token_s}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._seconds, self._token_s = dict(state["seconds"]), state["token_s"]

    def _moved(self, before: float, now: float) -> float:
        return self.momentum * before + (1 - self.momentum) * now


def _token_s(output: Output) -> float:
    """Return the seconds of a token between the first and the last reply to an episode; 0 where there are no two."""
    turns = [turn for turn in output.turns if turn.replied_at]
    if len(turns) < 2:
        return 0.0
    first, *between, last = turns
    seconds = last.replied_at - first.replied_at - sum(turn.waited_s for turn in (*between, last))
    tokens = last.start - first.stop - sum(turn.stop - turn.start for turn in between)
    return max(seconds, 0.0) / max(tokens, 1)


@dataclass(slots=True, kw_only=True)
class Piece:
    """Requests of one prompt that go to the same worker.

    Not frozen: a plan may have 100 000 of them, and a frozen one takes thrice as long to make.
    """

    requests: Sequence[RolloutRequest]
    median: float  # predicted tokens of an answer
    tail: float  # of a long one among them
    is_known: bool
    wait: float = 0.0  # tokens that an answer could sample while it waits for its environment

    @property
    def total(self) -> float:
        """Predicted tokens of all."""
        return self.median * len(self.requests)

    @property
    def duration(self) -> float:
        """Predicted tokens that could be sampled until an answer has ended: it may wait in between."""
        return self.median + self.wait


@dataclass(kw_only=True, eq=False)
class PredictingScheduler(Scheduler):
    """Learns lengths, waits and acceptance, and cuts a step's requests into pieces with predictions.

    A piece is a prompt's whole group when `keep_groups` is set and there are at least as many prompts as workers, so
    that siblings can draft for one another; else it is a single request. `costs` as for `QueueCost`, `momentum` and
    `tail` as for `LengthPredictor`.
    """

    keep_groups: bool = True
    costs: str | Points | None = None
    momentum: float = 0.5
    tail: float = 0.95

    def __post_init__(self) -> None:
        self.cost = QueueCost(self.costs)
        self.lengths = LengthPredictor(momentum=self.momentum, tail=self.tail)
        self.waits = WaitPredictor(momentum=self.momentum)

    def pieces(self, requests: Sequence[RolloutRequest], num_workers: int) -> list[Piece]:
        """Return the pieces in data order."""
        groups: dict[str, list[RolloutRequest]] = {}
        for request in requests:
            groups.setdefault(request.prompt.id, []).append(request)
        whole = self.keep_groups and len(groups) >= num_workers
        pieces: list[Piece] = []
        for group in groups.values():
            length, wait = self.lengths.predict(group[0]), self.waits.predict(group[0])
            pieces += [
                Piece(requests=part, median=length.median, tail=length.tail, is_known=length.is_known, wait=wait)
                for part in ([group] if whole else [[request] for request in group])
            ]
        return pieces

    def time(self, queue: Sequence[Piece], *, whole: bool = True) -> float:
        """Return the predicted time of a queue; if not `whole`, a piece stands for one of its requests."""
        load = QueueLoad(self.max_running)
        for piece in queue:
            load.add(len(piece.requests) if whole else 1, piece.median, piece.tail, wait=piece.wait)
        return self.cost.time(load.passes, load.total)

    def learn(self, samples: Sequence[Sample]) -> None:
        self.lengths.learn(samples)
        self.cost.learn(samples)
        if not self.lockstep:
            self.waits.learn(samples)

    def metrics(self) -> dict[str, float]:
        return self.lengths.metrics()

    def state_dict(self) -> dict[str, Any]:
        lengths, cost, waits = self.lengths.state_dict(), self.cost.state_dict(), self.waits.state_dict()
        return {"lengths": lengths, "cost": cost, "waits": waits}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.lengths.load_state_dict(state["lengths"])
        self.cost.load_state_dict(state["cost"])
        if "waits" in state:  # else they are learned anew
            self.waits.load_state_dict(state["waits"])


def queue_of(pieces: Sequence[Piece]) -> list[RolloutRequest]:
    """Return the requests of pieces, in their order."""
    return [request for piece in pieces for request in piece.requests]


def latest_first(pieces: Sequence[Piece]) -> list[RolloutRequest]:
    """Return the requests of pieces, the latest ends first: they may wait while others are decoded."""
    return queue_of(sorted(pieces, key=lambda piece: -piece.duration))
