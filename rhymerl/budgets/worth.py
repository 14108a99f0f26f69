"""What an accepted token is worth: where nothing waits for its slot, a batch takes as long as its slowest answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any

import numpy as np

from rhymerl.types import Completion, RolloutRequest

if TYPE_CHECKING:
    from rhymerl.costs import PassCost
    from rhymerl.types import FloatArray, IndexArray

_LATELY = 0.9  # of what earlier rollouts showed, a rollout with drafts
_IDLE = 0.98  # the same, a rollout without: what did not pay is tried again some day
_DOUBT = 3.0  # plain passes in favour of the drafts
_BATCHES = 6  # sizes that are told apart: 1 to 3 requests, 4 to 15, 16 to 63, ...


@dataclass(slots=True)
class TokenWorth:
    """Calibrates accepted tokens, as if each had saved its share of a plain pass, by what rollouts were spared.

    A token saves a whole pass where its request runs alone. Of R running requests the slowest decides how many passes come, and
    what the others accept makes later passes smaller, but not fewer, unless a waiting request takes the slot. So a token is
    worth 1 - loss * (1 - 1 / R) of its share. After a rollout the lengths of its answers tell how many passes it would have
    taken without drafts; the losses by size of the batch are those that explain best what was credited and not spared.
    A rollout is over when nothing is running.
    """

    _gram: FloatArray = field(default_factory=lambda: np.zeros((_BATCHES, _BATCHES)))  # of what losses apply to, by rollout
    _moment: FloatArray = field(default_factory=lambda: np.zeros(_BATCHES))  # the same with what was lost
    _loss: FloatArray = field(default_factory=lambda: np.zeros(_BATCHES))
    _credited: float = 0.0  # seconds of plain passes that accepted tokens were taken for, in this rollout
    _shared: FloatArray = field(default_factory=lambda: np.zeros(_BATCHES))  # of these, what a loss applies to
    _running: int = 0
    _most_running: int = 0  # at once, in this rollout
    _entered: dict[str, Completion | None] = field(default_factory=dict)  # of this rollout by id, and what they left with

    def of(self, rows: int) -> float:
        """Return what a token is worth in a batch of so many requests, as a part of a plain pass's share, 0 to 1."""
        return 1.0 - float(self._loss[_batch(rows)]) * (1.0 - 1.0 / rows)

    def admit(self, request: RolloutRequest) -> None:
        """A request enters."""
        self._running += 1
        self._most_running = max(self._most_running, self._running)
        self._entered[request.id] = None

    def credit(self, accepted: int, rows: int, plain: float) -> None:
        """A pass over `rows` requests, which would have taken `plain` seconds without drafts, accepted so many tokens."""
        share = accepted / rows * plain
        self._credited += share
        self._shared[_batch(rows)] += share * (1.0 - 1.0 / rows)

    def finish(self, completion: Completion, cost: PassCost) -> None:
        """A request leaves; the last one ends the rollout."""
        self._entered[completion.request.id] = completion
        self._running -= 1
        if self._running == 0:
            self._learn(cost)
            self._credited, self._most_running = 0.0, 0
            self._shared[:] = 0.0
            self._entered.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return what has been learned from the rollouts that are over."""
        return {"gram": self._gram.tolist(), "moment": self._moment.tolist()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state."""
        self._gram, self._moment = np.array(state["gram"]), np.array(state["moment"])
        self._solve()

    def _learn(self, cost: PassCost) -> None:
        left = [completion for completion in self._entered.values() if completion] if self._credited else []
        stays = [stay for stay in map(_stay, left) if stay[0]]
        remember = _LATELY if stays else _IDLE
        self._gram *= remember
        self._moment *= remember
        if stays and all(passes for _, passes in stays):  # not every engine counts them
            tokens, passes = (np.array(each, np.int64) for each in zip(*stays, strict=True))
            spared = self._seconds(tokens, cost) - self._seconds(passes, cost)
            full = float(cost.seconds(self._most_running, np.zeros(1), 0)[0])
            shared = self._shared / full
            self._gram += np.outer(shared, shared)
            self._moment += shared * (self._credited - spared) / full
        self._solve()

    def _seconds(self, passes: IndexArray, cost: PassCost) -> float:
        """Return the seconds of a rollout without drafts whose requests stay for so many passes, [R]."""
        rows = rows_by_pass(starts_in_turn(passes.tolist(), self._most_running), passes)
        return float(cost.seconds(rows, 0 * rows, 0 * rows).sum())

    def _solve(self) -> None:
        doubt = _DOUBT**2 * np.eye(_BATCHES)
        self._loss = np.clip(np.linalg.solve(self._gram + doubt, self._moment), 0.0, 1.0)


def _batch(rows: int) -> int:
    return min((rows.bit_length() - 1) // 2, _BATCHES - 1)


def _stay(completion: Completion) -> tuple[int, int]:
    """Return the tokens that the request sampled since it entered, and the passes that it took for them."""
    before = completion.request.output
    if before is None:
        return len(completion.token_ids), completion.num_passes
    return len(completion.token_ids) - len(before), completion.num_passes - before.num_passes


def starts_in_turn(passes: Sequence[int], slots: int) -> IndexArray:
    """Return the pass in which each request enters, [R], where it stays for so many passes and the next one takes its slot."""
    starts: list[int] = []
    ends: list[int] = []
    for each in passes:
        starts.append(heappop(ends) if len(ends) == slots else 0)
        heappush(ends, starts[-1] + each)
    return np.array(starts, np.int64)


def rows_by_pass(starts: IndexArray, passes: IndexArray) -> IndexArray:
    """Return how many requests run in each pass, [P], where each enters at `starts` [R] and stays for `passes` [R]."""
    ends = starts + passes
    size = int(ends.max()) + 1
    change = np.bincount(starts, minlength=size) - np.bincount(ends, minlength=size)
    return np.cumsum(change)[:-1].astype(np.int64)
