"""How long a running request's answer will be, by the prompt's answers in the history."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rhymerl.history.records import HistoryDelta
from rhymerl.types import RolloutRequest, Split

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
    """Of a prompt's answers in the latest epoch that answered it."""

    epoch: int
    total: int  # tokens
    count: int

    @property
    def mean(self) -> float:
        return self.total / self.count
