"""The parts shared by schedulers that plan by predicted lengths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rhymerl.costs import Points
from rhymerl.schedulers.base import Scheduler
from rhymerl.schedulers.lengths import LengthPredictor
from rhymerl.schedulers.queue_cost import QueueCost
from rhymerl.schedulers.waits import WaitPredictor
from rhymerl.types import RolloutRequest, Sample


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
