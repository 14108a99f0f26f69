"""A fixed budget: so many nodes a request and pass, whatever comes of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from rhymerl.budgets.base import Budget
from rhymerl.drafts import DraftBatch
from rhymerl.errors import require_at_least
from rhymerl.types import RolloutRequest

if TYPE_CHECKING:
    from rhymerl.types import BoolArray, IntArray


class FixedBudget(Budget):
    """Allows at most `nodes` nodes a request and pass, none of them less probable than `min_probability`.

    A node without a score is kept.
    """

    def __init__(self, nodes: int = 16, *, min_probability: float = 0.0) -> None:
        require_at_least({"nodes": (nodes, 0)})
        if not 0 <= min_probability <= 1:
            raise ValueError(f"min_probability={min_probability}: expected a number from 0 to 1")
        self.nodes = nodes
        self.min_probability = min_probability

    @property
    def max_nodes(self) -> int:
        return self.nodes

    def limits(self, requests: Sequence[RolloutRequest]) -> IntArray:
        return np.full(len(requests), self.nodes, np.int32)

    def trim(self, requests: Sequence[RolloutRequest], drafts: DraftBatch) -> BoolArray:
        return ~(drafts.scores < self.min_probability)
