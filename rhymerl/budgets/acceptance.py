"""The acceptance probability of a draft node, learned from earlier passes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rhymerl.compiled import compiled
from rhymerl.drafts import DraftBatch
from rhymerl.types import BoolArray, FloatArray, IndexArray, IntArray

# Lower ends of the bins of match length; 0 comes before. No index finds more than 32 tokens: longer matches are with
# prefetched answers, after a token in which they differ (33 on) or without one (49 on).
_LENGTHS = np.array([1, 2, 3, 4, 6, 8, 12, 16, 24, 33, 41, 49], np.int32)
_SHARES = 16  # bins of a node's share of the probability below its parent
_DEPTHS = 16  # bins for nodes without a score
_PRIOR = 8.0  # nodes that the drafter's own probability counts for
_REMEMBERED = 2048.0  # nodes a bin; when it has more, half of them are forgotten
_UNSCORED = 0.6  # how probable a node without a score is before any was seen
_KINDS = 9  # of sources, the ages of history up to three epochs among them; UNKNOWN is the first
_CERTAIN = 0.999  # no node is more probable than that
_SOURCE_PRIOR = 200.0  # accepted nodes that it counts for that sources are alike
_SOURCE_REMEMBERED = 2000.0  # expected ones of a source; when it has more, half of them are forgotten


class Acceptance:
    """Calibrates drafts: bins of match length x share below the parent, against what was accepted when the parent was.

    A node's share is its score over its parent's. Drafters without scores are calibrated by depth. Nodes of a source,
    and of history those of an age, are multiplied by what was accepted of them over what their bins had said.
    """

    def __init__(self) -> None:
        scored = np.broadcast_to((np.arange(_SHARES) + 0.5) / _SHARES, (len(_LENGTHS) + 1, _SHARES))
        self._expected = np.concatenate([scored.ravel(), np.full(_DEPTHS, _UNSCORED)])
        self._reached = np.zeros(len(self._expected))
        self._accepted = np.zeros(len(self._expected))
        self._of_source = np.zeros((2, _KINDS))  # expected and accepted nodes by source
        self._rate: FloatArray | None = None  # by bin, until something else is counted

    def probabilities(self, drafts: DraftBatch) -> FloatArray:
        """Return P(the node becomes a token), [N], never growing along a path."""
        expected, accepted = self._of_source
        factor = (accepted + _SOURCE_PRIOR) / (expected + _SOURCE_PRIOR)
        result: FloatArray = np.minimum(self._rates()[_bins(drafts)] * factor[_kinds(drafts)], _CERTAIN)
        multiply_down(result, drafts.parents, drafts.starts)
        return result

    def learn(self, drafts: DraftBatch, reached: BoolArray, accepted: BoolArray) -> None:
        """Count the nodes that could have been accepted, and those that were."""
        bins, kinds = _bins(drafts), _kinds(drafts)[reached]
        expected = np.bincount(kinds, self._rates()[bins[reached]], _KINDS)
        self._of_source += expected, np.bincount(kinds, accepted[reached], _KINDS)
        self._of_source[:, self._of_source[0] > _SOURCE_REMEMBERED] /= 2.0
        count(bins, reached, accepted, self._reached, self._accepted, _REMEMBERED)
        self._rate = None

    def _rates(self) -> FloatArray:
        """Return how probable a node is, by bin."""
        if self._rate is None:
            self._rate = (self._accepted + _PRIOR * self._expected) / (self._reached + _PRIOR)
        return self._rate

    def fade(self, share: float) -> None:
        """Let what was counted so far weigh only so much of what it did."""
        self._of_source *= share
        self._reached *= share
        self._accepted *= share
        self._rate = None

    def state_dict(self) -> dict[str, list[Any]]:
        """Return the counts by bin, and those by source."""
        counts = {"reached": self._reached, "accepted": self._accepted, "of_source": self._of_source}
        return {name: each.tolist() for name, each in counts.items()}

    def load_state_dict(self, state: Mapping[str, Sequence[Any]]) -> None:
        """Go on from saved counts; those of an earlier version, with other bins, are left out."""
        if len(state["reached"]) == len(self._expected):
            self._reached, self._accepted = np.array(state["reached"]), np.array(state["accepted"])
        of_source = np.array(state.get("of_source", ()))
        if of_source.shape == self._of_source.shape:
            self._of_source = of_source
        self._rate = None


def _kinds(drafts: DraftBatch) -> IndexArray:
    kinds: IndexArray = np.clip(drafts.sources, -1, _KINDS - 2).astype(np.int64) + 1
    return kinds


def _bins(drafts: DraftBatch) -> IndexArray:
    length = np.searchsorted(_LENGTHS, drafts.match_length, side="right")
    bins = np.empty(len(drafts.token_ids), np.int64)
    put_into_bins(drafts.scores, drafts.parents, drafts.starts, length, _SHARES, len(_LENGTHS) + 1, _DEPTHS, bins)
    return bins


@compiled
def put_into_bins(
    scores: FloatArray,
    parents: IntArray,
    starts: IndexArray,
    length_bins: npt.NDArray[np.intp],
    num_shares: int,
    num_lengths: int,
    num_depths: int,
    bins: IndexArray,
) -> None:
    """Bins [N]: match length x share, and behind these the depths of nodes whose share is not known (NaN)."""
    for r in range(len(starts) - 1):
        for n in range(starts[r], starts[r + 1]):
            parent = starts[r] + parents[n]
            above = scores[parent] if parents[n] >= 0 else 1.0
            share = scores[n] / above if above > 0 else 0.0
            if np.isnan(scores[n]) or np.isnan(above):
                depth, at = 0, parents[n]
                while at >= 0:
                    depth, at = depth + 1, parents[starts[r] + at]
                bins[n] = num_lengths * num_shares + min(depth, num_depths - 1)
            else:
                bins[n] = length_bins[r] * num_shares + min(max(int(share * num_shares), 0), num_shares - 1)


@compiled
def multiply_down(values: FloatArray, parents: IntArray, starts: IndexArray) -> None:
    """Multiply each node's value by those of all its ancestors, in place; parents come first."""
    for r in range(len(starts) - 1):
        for n in range(starts[r], starts[r + 1]):
            if parents[n] >= 0:
                values[n] *= values[starts[r] + parents[n]]


@compiled
def count(
    bins: IndexArray,
    reached: BoolArray,
    accepted: BoolArray,
    of_reached: FloatArray,
    of_accepted: FloatArray,
    most: float,
) -> None:
    """Add the reached nodes to their bins; a bin that has more than `most` then forgets half of them."""
    for n in range(len(bins)):
        if reached[n]:
            of_reached[bins[n]] += 1.0
            of_accepted[bins[n]] += accepted[n]
    for b in range(len(of_reached)):
        if of_reached[b] > most:
            of_reached[b] /= 2.0
            of_accepted[b] /= 2.0


@compiled
def largest_part(mask: BoolArray, starts: IndexArray) -> int:
    """Return the most nodes of `mask` [N] that a request has."""
    largest = 0
    for r in range(len(starts) - 1):
        size = 0
        for n in range(starts[r], starts[r + 1]):
            size += mask[n]
        largest = max(largest, size)
    return largest


@compiled
def rank_in_drafts(worth: FloatArray, starts: IndexArray, rank: IndexArray) -> None:
    """Count, for each node, the nodes of its request before it: those worth more, or as much but listed earlier."""
    for r in range(len(starts) - 1):
        for node in range(starts[r], starts[r + 1]):
            before = 0
            for other in range(starts[r], starts[r + 1]):
                before += worth[other] > worth[node] or (worth[other] == worth[node] and other < node)
            rank[node] = before
