"""What a token of each running request is worth: those of the requests that end last shorten the rollout most."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rhymerl.costs import PassCost
from rhymerl.history.records import HistoryDelta
from rhymerl.types import BoolArray, FloatArray, IndexArray, RolloutRequest, Split

_LEAST_SPREAD = 0.1  # of the predicted lengths
_RENEWED_EVERY = 32
_FEWER = 0.5  # of the rows: how the time of a pass changes as requests end is seen from here to all of them
_REMEMBER = 0.95  # of the error, a prompt


class LengthTable:
    """The mean length of the latest answers to each prompt, and how far these were from the ones before."""

    def __init__(self) -> None:
        self._seen: dict[tuple[Split, str], _Lengths] = {}
        self.error = 0.0  # of a prediction, relative to it, on average

    def follow(self, delta: HistoryDelta) -> None:
        """Take new answers and compare them with their predictions; answers of a snapshot have none."""
        if delta.is_snapshot:
            self._seen.clear()
        for change in delta:
            name = change.split, change.key
            if change.is_forgotten:
                self._seen.pop(name, None)
            if change.added:
                before, epoch = self._seen.get(name), change.added[-1].epoch
                lengths = [len(answer) for answer in change.added if answer.epoch == epoch]
                if before is not None and change.split == "train" and not delta.is_snapshot:
                    self._learn_error(lengths, before.mean)
                total, count = (before.total, before.count) if before is not None and before.epoch == epoch else (0, 0)
                self._seen[name] = _Lengths(epoch=epoch, total=total + sum(lengths), count=count + len(lengths))

    def _learn_error(self, lengths: Sequence[int], predicted: float) -> None:
        error = sum(abs(length - predicted) for length in lengths) / (len(lengths) * max(predicted, 1.0))
        self.error = _REMEMBER * self.error + (1 - _REMEMBER) * error if self.error else error

    def predict(self, request: RolloutRequest) -> float:
        """Return the tokens that the whole answer is expected to have; NaN for a prompt that has not been answered."""
        seen = self._seen.get((request.split, request.prompt.key))
        return math.nan if seen is None else seen.mean


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lengths:
    """The lengths of a prompt's answers in the latest epoch that answered it."""

    epoch: int
    total: int  # tokens
    count: int

    @property
    def mean(self) -> float:
        return self.total / self.count


class TokenWeights:
    """Weighs tokens by the time that they save.

    A pass over B requests takes a time c(B), of which a part goes by its requests and a part does not. A token that a
    draft adds ends its request one pass earlier. That saves the request's own part of a pass; the other part is saved
    only if the request is the last one to end. So of B tokens worth c(B) together, that of request i is worth c(B) -
    c(B - 1), and P(i ends last) of the rest. The probabilities follow from the lengths that the prompts' earlier
    answers had, and from how far such predictions were off. Nobody waits for the last one of a later step yet.
    """

    def __init__(self) -> None:
        self._lengths = LengthTable()
        self._expected: dict[str, float] = {}  # tokens of the whole answer, NaN = unknown, by id of a running request
        self.runs_ahead = False  # requests of a later step have been seen beside those of an earlier one
        self._own = 1.0  # the part of a pass over `_rows` requests that goes by its requests
        self._rows = self._num_asked = 0

    def follow(self, delta: HistoryDelta) -> None:
        """Learn the lengths of new answers."""
        self._lengths.follow(delta)

    def enter(self, request: RolloutRequest) -> None:
        """A request runs from now on."""
        self._expected[request.id] = self._lengths.predict(request)

    def leave(self, request: RolloutRequest) -> None:
        """It has left."""
        self._expected.pop(request.id, None)

    def weights(
        self, requests: Sequence[RolloutRequest], num_generated: IndexArray, cost: PassCost
    ) -> FloatArray | None:
        """Return each request's weight, [R], of mean 1; None where nothing tells the requests apart."""
        if len(requests) == 1:
            return None
        ahead = _ahead(requests)
        self.runs_ahead = self.runs_ahead or bool(ahead.any())
        expected = np.array([self._expected[request.id] for request in requests])
        unknown = np.isnan(expected)
        if unknown.any():
            if unknown.all() and not ahead.any():
                return None
            expected[unknown] = expected[~unknown].mean() if not unknown.all() else 1.0
        left = np.maximum(expected - num_generated, 1.0)
        spread = max(self._lengths.error, _LEAST_SPREAD) * float(expected.mean())
        last = np.where(ahead, 0.0, np.exp(np.minimum(left - left[~ahead].max(), 0.0) / spread))
        own = self._own_part(len(requests), cost)
        weights: FloatArray = own + (1 - own) * len(requests) / last.sum() * last
        return weights

    def _own_part(self, rows: int, cost: PassCost) -> float:
        """Return the share of a pass that depends on its requests, computed anew at times: costs are learned."""
        self._num_asked += 1
        if rows != self._rows or self._num_asked % _RENEWED_EVERY == 0:
            fewer = max(int(_FEWER * rows), 1)
            whole, less = cost.seconds(np.array([rows, fewer]), np.zeros(2), np.zeros(2, np.int64)).tolist()
            self._own = min(max((whole - less) / (rows - fewer), 0.0) * rows / whole, 1.0)
            self._rows = rows
        return self._own

    def state_dict(self) -> dict[str, Any]:
        """Return what the history does not tell again."""
        return {"length_error": self._lengths.error, "runs_ahead": self.runs_ahead}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state."""
        self._lengths.error = state["length_error"]
        self.runs_ahead = state["runs_ahead"]


def _ahead(requests: Sequence[RolloutRequest]) -> BoolArray:
    """Return which requests are of a later step than others, [R]."""
    steps = [request.step for request in requests if request.step is not None]
    first = min(steps, default=0)
    return np.array([request.step is not None and request.step > first for request in requests], np.bool_)
