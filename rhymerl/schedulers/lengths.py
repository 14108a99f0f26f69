"""Predictions of answers' lengths, from how long earlier answers to the same prompt were."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rhymerl.errors import at_least, check_ranges, require
from rhymerl.types import RolloutRequest, Sample

_RECENT = 4096  # lengths that the running quantile is of


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedLength:
    """Response tokens of the answers to a prompt."""

    median: float
    tail: float  # an upper quantile of the group; never below the median
    is_known: bool = True


@dataclass(slots=True)
class _Seen:
    """The moving quantiles of a prompt; one that is `cut` is "at least": the answers there were cut off."""

    median: float
    tail: float
    median_is_cut: bool = False
    tail_is_cut: bool = False


@dataclass(kw_only=True, eq=False)
class LengthPredictor:
    """Predicts a prompt's lengths by the median and an upper quantile of its groups, moving over epochs.

    `momentum` is the weight of what was known before a group; `tail` the upper quantile, among a group (the longest one
    of up to 20 samples) and among all prompts. An answer of finish reason `length` says "at least so long": a quantile
    that falls on such answers never pulls an estimate down, and counts as the limit of the request that asks next. A
    prompt without an answer is predicted by the running upper quantile of all recent lengths, and by the request's own
    limit before there are any. Beyond `max_prompts`, the prompts that were not answered for longest are forgotten.
    """

    momentum: float = 0.5
    tail: float = 0.95
    max_prompts: int = at_least(1, 1_000_000)

    def __post_init__(self) -> None:
        for name in ("momentum", "tail"):
            require(0 <= getattr(self, name) < 1, name, getattr(self, name), "at least 0 and less than 1")
        check_ranges(self)
        self._prompts: dict[str, _Seen] = {}  # by key, the latest answered last
        self._recent: deque[int] = deque(maxlen=_RECENT)
        self._unknown: float | None = None  # the running upper quantile
        self._growth: deque[float] = deque(maxlen=_RECENT)  # a group's tail over what was predicted for it
        self._errors: list[float] = [0.0, 0]  # sum and number since the last metrics()

    def __len__(self) -> int:
        return len(self._prompts)

    def predict(self, request: RolloutRequest) -> PredictedLength:
        """Return predicted lengths of the answers to the request's prompt, never beyond its limit."""
        limit = float(request.sampling.max_tokens)
        seen = self._prompts.get(request.prompt.key)
        if seen is None:
            length = limit if self._unknown is None else min(self._unknown, limit)
            return PredictedLength(median=length, tail=length, is_known=False)
        median = limit if seen.median_is_cut else min(seen.median, limit)
        tail = limit if seen.tail_is_cut else min(seen.tail, limit)
        return PredictedLength(median=median, tail=max(median, tail))

    def learn(self, samples: Sequence[Sample]) -> None:
        """The finished answers of a step, groups whole; their errors are counted before they are learned."""
        groups: dict[str, list[Sample]] = {}
        for sample in samples:
            groups.setdefault(sample.prompt.key, []).append(sample)
        for key, group in groups.items():
            self._count_errors(group)
            self._learn(key, group)
        while len(self._prompts) > self.max_prompts:
            del self._prompts[next(iter(self._prompts))]
        if self._recent:
            self._unknown = _quantile(sorted(self._recent), self.tail)

    def growth(self, quantile: float) -> float:
        """Return a quantile of the tails of recent groups over their predictions; 1 before there are any."""
        return _quantile(sorted(self._growth), quantile) if self._growth else 1.0

    def metrics(self) -> dict[str, float]:
        """`sched/length_pred_mae`, tokens, of the answers since the last call; nothing when none had been predicted."""
        total, count = self._errors
        self._errors = [0.0, 0]
        return {"sched/length_pred_mae": total / count} if count else {}

    def state_dict(self) -> dict[str, Any]:
        return {
            "prompts": {
                key: [seen.median, seen.tail, seen.median_is_cut, seen.tail_is_cut]
                for key, seen in self._prompts.items()
            },
            "recent": list(self._recent),
            "growth": list(self._growth),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._prompts = {key: _Seen(*values) for key, values in state["prompts"].items()}
        self._recent = deque(state["recent"], maxlen=_RECENT)
        self._growth = deque(state["growth"], maxlen=_RECENT)
        self._unknown = _quantile(sorted(self._recent), self.tail) if self._recent else None

    def _count_errors(self, group: Sequence[Sample]) -> None:
        if not self._recent:
            return  # the limit is no prediction
        predicted = self.predict(group[0].completion.request).median
        for sample in group:
            is_cut = sample.completion.output.is_cut
            error = predicted - sample.num_sampled
            self._errors[0] += max(-error, 0.0) if is_cut else abs(error)  # "at least" is met by any longer prediction
        self._errors[1] += len(group)

    def _learn(self, key: str, group: Sequence[Sample]) -> None:
        lengths = sorted(sample.num_sampled for sample in group)
        limits = [sample.num_sampled for sample in group if sample.completion.output.is_cut]
        cut_from = min(limits, default=math.inf)
        median, tail = _middle(lengths), _quantile(lengths, self.tail)
        known = self._prompts.pop(key, None)  # what is learned last stands last
        seen = known if known is not None else _Seen(median, tail)
        if known is not None and not known.tail_is_cut and tail < cut_from:
            self._growth.append(tail / max(known.tail, 1.0))
        seen.median, seen.median_is_cut = self._moved(seen.median, median, is_cut=median >= cut_from)
        seen.tail, seen.tail_is_cut = self._moved(seen.tail, tail, is_cut=tail >= cut_from)
        self._prompts[key] = seen
        self._recent.extend(lengths)

    def _moved(self, before: float, now: float, *, is_cut: bool) -> tuple[float, bool]:
        if is_cut:
            return max(before, now), True
        return self.momentum * before + (1 - self.momentum) * now, False


def _middle(ordered: Sequence[int]) -> float:
    half = len(ordered) // 2
    return float(ordered[half]) if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def _quantile(ordered: Sequence[float], share: float) -> float:
    """Return the smallest value that at least this share of the values do not exceed."""
    return ordered[max(math.ceil(share * len(ordered)) - 1, 0)]
