"""Verifies what pays where all requests of a pass have trees of one size, as in SGLang: the size is chosen pass by pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from rhymerl.budgets.acceptance import largest_part
from rhymerl.budgets.goodput import GoodputBudget
from rhymerl.compiled import compiled
from rhymerl.drafts import DraftBatch
from rhymerl.errors import require

if TYPE_CHECKING:
    from rhymerl.types import BoolArray, FloatArray, IndexArray


@dataclass(eq=False)
class UniformGoodputBudget(GoodputBudget):
    """GoodputBudget's choice among `widths`, which rise: so many nodes of every request are computed, whether its draft has them or not.

    With w nodes a request a pass over B requests costs what B w nodes cost, and adds the w best nodes of each draft.
    Further arguments are GoodputBudget's. Raises ValueError for widths that do not begin with 0 or do not rise.
    """

    nodes: int = field(init=False)
    widths: Sequence[int] = field()

    def __post_init__(self) -> None:
        given = list(self.widths)
        rises = given[:1] == [0] and sorted(set(given)) == given
        require(rises, "widths", given, "rising numbers of nodes, the first of them 0")
        self.nodes = given[-1]
        self._sizes = np.array(given, np.int64)
        super().__post_init__()

    def width_of(self, largest: int) -> int:
        """Return the smallest width that holds a draft of so many nodes."""
        return int(self._sizes[np.searchsorted(self._sizes, largest)])

    def _chosen(self, drafts: DraftBatch, worth: FloatArray, asked: int) -> BoolArray:
        rank = np.empty(len(worth), np.int64)
        _rank(worth, drafts.starts, rank)
        rows = asked if self._kind == "probe" else max(self._rows, asked)
        sizes = self._sizes[: max(int(np.searchsorted(self._sizes * rows, self._course.trusted, side="right")), 2)]
        added = np.bincount(rank, weights=worth, minlength=self.nodes)
        expected = np.concatenate([[0.0], np.cumsum(added)])[sizes]
        best = self._best(sizes * rows, expected, asked)
        if self._kind == "probe":
            best = max(best, min(1, len(sizes) - 1))  # only what is verified teaches anything
        chosen: BoolArray = rank < sizes[best]
        return chosen

    def _num_computed(self, rows: int, drafted: FloatArray, nodes: FloatArray) -> FloatArray:
        widths: FloatArray = self._sizes[np.searchsorted(self._sizes, np.minimum(nodes, self.widths[-1]))].astype(float)
        return rows * widths

    def _num_verified(self, drafts: DraftBatch, mask: BoolArray) -> int:
        return max(self._rows, len(drafts)) * self.width_of(int(largest_part(mask, drafts.starts)))


@compiled
def _rank(worth: FloatArray, starts: IndexArray, rank: IndexArray) -> None:
    """How many nodes of the same request come before each: those that are worth more, or as much and stand before it."""
    for r in range(len(starts) - 1):
        for node in range(starts[r], starts[r + 1]):
            before = 0
            for other in range(starts[r], starts[r + 1]):
                before += worth[other] > worth[node] or (worth[other] == worth[node] and other < node)
            rank[node] = before
