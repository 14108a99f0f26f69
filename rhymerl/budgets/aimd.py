"""The window rule of the RhymeRL paper (arXiv 2508.18588): longer drafts while they are accepted whole, short ones after a miss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from rhymerl.budgets.base import Budget, PassOutcome
from rhymerl.errors import require_at_least
from rhymerl.types import RolloutRequest

if TYPE_CHECKING:
    from rhymerl.types import IntArray


class AIMDBudget(Budget):
    """A request starts with `start` nodes, gains `increase` when all of a draft is accepted, and falls back after any rejection.

    It never has more than `nodes`.
    """

    def __init__(self, nodes: int = 32, *, start: int = 2, increase: int = 2) -> None:
        require_at_least({"nodes": (nodes, 1), "start": (start, 1), "increase": (increase, 0)})
        self.nodes = nodes
        self.start = start
        self.increase = increase
        self._window: dict[str, int] = {}  # by id of a running request

    @property
    def max_nodes(self) -> int:
        return self.nodes

    def limits(self, requests: Sequence[RolloutRequest]) -> IntArray:
        return np.array([self._of(request) for request in requests], np.int32)

    def _of(self, request: RolloutRequest) -> int:
        return min(self._window.get(request.id, self.start), self.nodes)

    def learn(self, outcome: PassOutcome) -> None:
        counts = outcome.drafts.counts
        for r in np.flatnonzero(counts).tolist():
            request = outcome.requests[r]
            whole = outcome.num_accepted[r] == counts[r]
            self._window[request.id] = self._of(request) + self.increase if whole else self.start

    def finish(self, request: RolloutRequest) -> None:
        self._window.pop(request.id, None)
