"""How probable it is that a draft node is accepted, learned from what was."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from rhymerl.compiled import compiled
from rhymerl.types import DraftBatch

if TYPE_CHECKING:
    from rhymerl.types import BoolArray, FloatArray, IndexArray

_LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24)  # lower ends of the bins of match length; 0 comes before
_SHARES = 16  # bins of a node's share of the probability below its parent
_DEPTHS = 16  # bins for nodes without a score
_PRIOR = 8.0  # nodes that the drafter's own probability counts for
_REMEMBERED = 2048.0  # nodes a bin; when it has more, half of them are forgotten
_UNSCORED = 0.6  # how probable a node without a score is before any was seen


class Acceptance:
    """Calibrates drafts: bins of match length x share below the parent, against what was accepted when the parent was.

    A node's share is its score over its parent's. Drafters without scores are calibrated by depth.
    """

    def __init__(self) -> None:
        scored = np.broadcast_to((np.arange(_SHARES) + 0.5) / _SHARES, (len(_LENGTHS) + 1, _SHARES))
        self._expected = np.concatenate([scored.ravel(), np.full(_DEPTHS, _UNSCORED)])
        self._reached = np.zeros(len(self._expected))
        self._accepted = np.zeros(len(self._expected))

    def probabilities(self, drafts: DraftBatch) -> FloatArray:
        """P(the node becomes a token), [N], never growing along a path."""
        rate = (self._accepted + _PRIOR * self._expected) / (self._reached + _PRIOR)
        result = rate[self._bins(drafts)]
        multiply_down(result, drafts.parent_nodes)
        return result

    def learn(self, drafts: DraftBatch, reached: BoolArray, accepted: BoolArray) -> None:
        """Count the nodes that could have been accepted, and those that were."""
        bins = self._bins(drafts)[reached]
        self._reached += np.bincount(bins, minlength=len(self._reached))
        self._accepted += np.bincount(bins, weights=accepted[reached], minlength=len(self._accepted))
        full = self._reached > _REMEMBERED
        self._reached[full] /= 2
        self._accepted[full] /= 2

    def _bins(self, drafts: DraftBatch) -> IndexArray:
        parent = drafts.parent_nodes
        above = np.where(parent >= 0, drafts.scores[parent], 1.0) if len(parent) else drafts.scores
        share = np.clip(drafts.scores / np.maximum(above, 1e-300), 0.0, 1.0)
        scored = ~np.isnan(share)
        length = np.searchsorted(_LENGTHS, drafts.match_length, side="right")[drafts.requests]
        by_share = length * _SHARES + np.minimum(np.where(scored, share, 0.0) * _SHARES, _SHARES - 1).astype(np.int64)
        if scored.all():
            return np.asarray(by_share)
        depth = np.zeros(len(parent), np.int64)
        count_down(depth, parent)
        by_depth = (len(_LENGTHS) + 1) * _SHARES + np.minimum(depth, _DEPTHS - 1)
        return np.asarray(np.where(scored, by_share, by_depth))


@compiled
def multiply_down(values: FloatArray, parents: IndexArray) -> None:
    """Multiply each node's value by all of its ancestors', in place; parents come first."""
    for node in range(len(values)):
        if parents[node] >= 0:
            values[node] *= values[parents[node]]


@compiled
def count_down(depths: IndexArray, parents: IndexArray) -> None:
    """Depth of each node from 0, in place; parents come first."""
    for node in range(len(depths)):
        depths[node] = 0 if parents[node] < 0 else depths[parents[node]] + 1
