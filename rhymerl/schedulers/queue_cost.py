"""The cost of a queue: passes until its last answer has ended, and tokens of all of them."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rhymerl.costs import Points, points_of
from rhymerl.types import FloatArray, Sample

Amount = TypeVar("Amount", float, FloatArray)
ASSUMED: Points = ((0, 1.0), (128, 2.0))  # without measuring: a pass costs 1 + tokens / 128
_FORGET = 0.5  # a step: acceptance follows the epochs


class QueueLoad:
    """The predicted answers of a queue: `max_running` run at a time (None: all), and a free slot takes the next."""

    def __init__(self, max_running: int | None) -> None:
        self.passes = 0.0  # until the last one has ended, with a token a pass
        self.total = 0.0  # tokens
        self._max_running = max_running
        self._ends: list[float] = []  # of the slots

    def add(self, count: int, length: float, longest: float, *, wait: float = 0.0) -> None:
        """Put `count` answers of one length behind the others; one of them may have `longest` tokens.

        Each waits for as long as `wait` tokens take, without a slot.
        """
        self.total += count * length
        last = max(longest, length)
        if self._max_running is not None:
            last = max(last, *(self._enter(length, self._max_running) for _ in range(count)))
        self.passes = max(self.passes, last + wait)

    def _enter(self, length: float, slots: int) -> float:
        """Return when an answer ends that enters the slot that is free first."""
        if len(self._ends) < slots:
            heapq.heappush(self._ends, length)
            return length
        end = self._ends[0] + length
        heapq.heapreplace(self._ends, end)
        return end


class QueueCost:
    """Time of a queue in the unit of `costs`.

    `costs` are points [tokens of a pass, seconds], as `rhymerl bench costs` measures them, or a JSON file {"costs":
    [...]} of them; a line from the first point to the last one stands for the curve. A queue then takes (base * passes
    + per_token * verified * total) / tokens_per_pass, where drafting sets tokens_per_pass (tokens emitted a pass and
    request) and verified (tokens verified for them); both are learned from finished answers. Raises ValueError for a
    curve that is none.
    """

    def __init__(self, costs: str | Path | Points | None = None) -> None:
        points = points_of(ASSUMED if costs is None else costs)
        (first_tokens, first_cost), (last_tokens, last_cost) = points[0], points[-1]
        self.per_token = (last_cost - first_cost) / (last_tokens - first_tokens)
        self.base = max(first_cost - self.per_token * first_tokens, 0.0)
        self.tokens_per_pass = 1.0
        self.verified = 1.0

    def time(self, passes: Amount, total: Amount) -> Amount:
        """Return the time of a queue, or of many, for `total` tokens in its passes: if all run at once, its longest."""
        return (self.base * passes + self.per_token * self.verified * total) / self.tokens_per_pass

    def learn(self, samples: Sequence[Sample]) -> None:
        """Learn acceptance from answers that say how many passes they took."""
        done = [sample.completion for sample in samples if sample.completion.num_passes]
        passes = sum(each.num_passes for each in done)
        if not passes:
            return
        tokens = sum(each.output.num_sampled for each in done) / passes
        verified = 1 + sum(each.num_drafted for each in done) / passes
        self.tokens_per_pass = _FORGET * self.tokens_per_pass + (1 - _FORGET) * max(tokens, 1.0)
        self.verified = _FORGET * self.verified + (1 - _FORGET) * verified

    def state_dict(self) -> dict[str, Any]:
        return {"tokens_per_pass": self.tokens_per_pass, "verified": self.verified}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.tokens_per_pass, self.verified = state["tokens_per_pass"], state["verified"]
