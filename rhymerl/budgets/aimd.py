"""The window rule of the RhymeRL paper (arXiv 2508.18588): drafts grow while accepted whole, and shrink on a miss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace

import numpy as np

from rhymerl.budgets.base import Budget, PassOutcome
from rhymerl.errors import at_least, check_ranges, require
from rhymerl.types import IntArray, RolloutRequest


@dataclass(eq=False)
class AIMDBudget(Budget):
    """A request starts with `start` nodes, gains `increase` per fully accepted draft, and falls back on a rejection.

    It never has more than `nodes`. Passes over more than `max_batch_size` running requests have no drafts: where that
    pays depends on model and device, and the paper profiles it. None sets no such gate.
    """

    nodes: int = at_least(1, 32)
    _: KW_ONLY
    start: int = at_least(1, 2)
    increase: int = at_least(0, 2)
    max_batch_size: int | None = None

    def __post_init__(self) -> None:
        check_ranges(self)
        is_gate = self.max_batch_size is None or self.max_batch_size >= 1
        require(is_gate, "max_batch_size", self.max_batch_size, "at least 1, or null")
        self._window: dict[str, int] = {}  # by id of a running request

    @property
    def max_nodes(self) -> int:
        return self.nodes

    def uniform(self, widths: Sequence[int]) -> AIMDBudget:
        budget = replace(self, nodes=widths[-1])
        budget.widths = widths
        return budget

    def skips(self, num_requests: int) -> int:
        return int(self.max_batch_size is not None and num_requests > self.max_batch_size)

    def limits(self, requests: Sequence[RolloutRequest]) -> IntArray:
        windows = [self._window.setdefault(request.id, self.start) for request in requests]
        return np.minimum(windows, self.nodes).astype(np.int32)

    def learn(self, outcome: PassOutcome) -> None:
        counts = outcome.drafts.counts
        for r in np.flatnonzero(counts).tolist():
            name, whole = outcome.requests[r].id, outcome.num_accepted[r] == counts[r]
            if name in self._window:  # else it has left by now
                self._window[name] = self._window[name] + self.increase if whole else self.start

    def finish(self, request: RolloutRequest) -> None:
        self._window.pop(request.id, None)
