"""A fixed budget: so many nodes a request and pass, whatever comes of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace

import numpy as np

from rhymerl.budgets.base import Budget
from rhymerl.drafts import DraftBatch
from rhymerl.errors import at_least, check_ranges, require
from rhymerl.types import BoolArray, IntArray, RolloutRequest


@dataclass(eq=False)
class FixedBudget(Budget):
    """Allows at most `nodes` nodes a request and pass, none of them less probable than `min_probability`.

    A node without a score is kept.
    """

    nodes: int = at_least(0, 16)
    _: KW_ONLY
    min_probability: float = 0.0

    def __post_init__(self) -> None:
        check_ranges(self)
        require(0 <= self.min_probability <= 1, "min_probability", self.min_probability, "a number from 0 to 1")
        self.widths = () if self.min_probability else (self.nodes,)

    @property
    def max_nodes(self) -> int:
        return self.nodes

    def uniform(self, widths: Sequence[int]) -> FixedBudget:
        budget = replace(self, nodes=widths[-1])
        budget.widths = budget.widths or widths
        return budget

    def limits(self, requests: Sequence[RolloutRequest]) -> IntArray:
        return np.full(len(requests), self.nodes, np.int32)

    def trim(self, requests: Sequence[RolloutRequest], drafts: DraftBatch) -> BoolArray:
        return ~(drafts.scores < self.min_probability)
