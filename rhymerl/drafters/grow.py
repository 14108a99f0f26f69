"""Compiled: grow a draft tree from the positions of a context's suffixes, the most probable node first.

Every occurrence votes for the token that followed it, with a weight that grows with the length of the shared suffix. A
node keeps the occurrences that agree with its path, so its children's probabilities come from what followed there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from rhymerl.compiled import compiled
from rhymerl.drafts import DraftBatch, DraftSource

if TYPE_CHECKING:
    from rhymerl.types import FloatArray, IndexArray, IntArray

OWN, SIBLING, OTHER, HISTORY = (
    int(each) for each in (DraftSource.OWN, DraftSource.SIBLING, DraftSource.OTHER, DraftSource.HISTORY)
)
MOST_AGE = 127 - HISTORY  # sources are int8; what is older counts as this old there


class TreeBuffers:
    """Room for one tree a line, L lines of at most `most` nodes; `grow_trees` fills it, `packed` makes a batch of it."""

    def __init__(self, num_lines: int, most: int) -> None:
        self.token_ids: IntArray = np.empty((num_lines, most), np.int32)
        self.parents: IntArray = np.empty((num_lines, most), np.int32)
        self.scores = np.empty((num_lines, most), np.float64)
        self.sources = np.empty((num_lines, most), np.int8)
        self.counts = np.zeros(num_lines, np.int64)
        self.longest: IntArray = np.zeros(num_lines, np.int32)  # tokens of the longest match

    def packed(self) -> DraftBatch:
        """Return the drafts in the order of the lines."""
        starts = np.zeros(len(self.counts) + 1, np.int64)
        np.cumsum(self.counts, out=starts[1:])
        total = int(starts[-1])
        token_ids, parents = np.empty((2, total), np.int32)
        scores, sources = np.empty(total), np.empty(total, np.int8)
        _join(self.token_ids, self.parents, self.scores, self.sources, starts, token_ids, parents, scores, sources)
        return DraftBatch(
            token_ids=token_ids,
            parents=parents,
            starts=starts,
            scores=scores,
            match_length=self.longest,
            sources=sources,
        )


@compiled
def _join(
    token_ids: IntArray,
    parents: IntArray,
    scores: FloatArray,
    sources: npt.NDArray[np.int8],
    starts: IndexArray,
    all_token_ids: IntArray,
    all_parents: IntArray,
    all_scores: FloatArray,
    all_sources: npt.NDArray[np.int8],
) -> None:
    """Join lines [L, most] one behind the other."""
    for line in range(len(starts) - 1):
        for index in range(starts[line], starts[line + 1]):
            node = index - starts[line]
            all_token_ids[index], all_parents[index] = token_ids[line, node], parents[line, node]
            all_scores[index], all_sources[index] = scores[line, node], sources[line, node]


@compiled
def region_of(starts: IndexArray, position: int) -> int:
    """Return the last region that starts at or before the position."""
    low, high = 0, len(starts)
    while high - low > 1:
        middle = (low + high) // 2
        if starts[middle] <= position:
            low = middle
        else:
            high = middle
    return low


@compiled
def grow_trees(
    live_text: IntArray,
    live_starts: IndexArray,
    live_positions: IntArray,
    live_lengths: IntArray,
    live_counts: IntArray,
    sealed_text: IntArray,
    sealed_starts: IndexArray,
    sealed_positions: IntArray,
    sealed_lengths: IntArray,
    sealed_counts: IntArray,
    sealed_weights: FloatArray,
    sealed_favours: FloatArray,
    sealed_ages: IntArray,
    pool_text: IntArray,
    pool_positions: IntArray,
    pool_lengths: IntArray,
    pool_counts: IntArray,
    pool_weight: float,
    rows: IndexArray,
    use_own: bool,
    use_siblings: bool,
    length_weight: float,
    escape: float,
    max_branches: int,
    budgets: IntArray,
    lines: IndexArray,
    token_ids: IntArray,
    parents: IntArray,
    scores: FloatArray,
    sources: npt.NDArray[np.int8],
    counts: IndexArray,
    longest: IntArray,
) -> None:
    """Draft for the queries r of one prompt, from their matches in its live and its sealed index, and in the pool.

    `rows` [R] are the queries' own rows of the live text (row 0 is the prompt). What goes to line lines[r] of the outputs:
    `token_ids`, `parents`, `scores`, `sources` [*, most nodes] and `counts`, `longest` (shared tokens) [*].
    `sealed_weights`, `sealed_favours`, `sealed_ages` [A] are those of the earlier answers; favours decide between branches
    when there are more than `max_branches`. Answers of the pool weigh `pool_weight`, each.
    """
    most = live_positions.shape[1] + sealed_positions.shape[1] + pool_positions.shape[1]
    index, shared = np.empty(most, np.int64), np.empty(most, np.int64)
    weight, favour = np.empty(most, np.float64), np.empty(most, np.float64)
    source = np.empty(most, np.int8)
    for r in range(len(rows)):
        size = 0
        for i in range(live_counts[r]):
            region = region_of(live_starts, live_positions[r, i])
            own = region == rows[r] or region == 0
            if use_own if own else use_siblings:
                index[size], shared[size] = live_positions[r, i], live_lengths[r, i]
                weight[size], favour[size] = 1.0, 0.0
                source[size] = OWN if own else SIBLING
                size += 1
        for i in range(sealed_counts[r]):
            region = region_of(sealed_starts, sealed_positions[r, i])
            index[size], shared[size] = sealed_positions[r, i], sealed_lengths[r, i]
            weight[size], favour[size] = sealed_weights[region], sealed_favours[region]
            source[size] = HISTORY + min(sealed_ages[region], MOST_AGE)
            size += 1
        for i in range(pool_counts[r]):
            index[size], shared[size] = pool_positions[r, i], pool_lengths[r, i]
            weight[size], favour[size] = pool_weight, 0.0
            source[size] = OTHER
            size += 1
        top = 0
        for i in range(size):
            top = max(top, shared[i])
        for i in range(size):
            weight[i] *= length_weight ** (shared[i] - top)
        line = lines[r]
        longest[line] = top
        counts[line] = grow_tree(
            live_text,
            sealed_text,
            pool_text,
            index,
            weight,
            favour,
            source,
            size,
            budgets[r],
            escape,
            max_branches,
            token_ids[line],
            parents[line],
            scores[line],
            sources[line],
        )


@compiled
def open_children(
    member: IndexArray,
    follows: IndexArray,
    weight: FloatArray,
    favour: FloatArray,
    begin: int,
    end: int,
    first: IndexArray,
    last: IndexArray,
    votes: FloatArray,
    favours: FloatArray,
    num_open: int,
) -> int:
    """Put equal tokens of the occurrences begin ... end - 1 side by side and append each run, with its sums; returns `num_open`."""
    i = begin
    while i < end:
        token = follows[member[i]]
        j, votes_here, favours_here = i, 0.0, 0.0
        for k in range(i, end):
            m = member[k]
            if follows[m] == token:
                member[k], member[j] = member[j], m
                votes_here += weight[m]
                if weight[m] > 0.0:  # else it is no longest match, and those alone count
                    favours_here += favour[m]
                j += 1
        if token >= 0 and votes_here > 0.0:
            first[num_open], last[num_open] = i, j
            votes[num_open], favours[num_open] = votes_here, favours_here
            num_open += 1
        i = j
    return num_open


@compiled
def take_out(
    k: int,
    first: IndexArray,
    last: IndexArray,
    parent: IndexArray,
    score: FloatArray,
    rank: FloatArray,
    num_open: int,
) -> int:
    """Remove the k-th open child; the last one takes its place. Returns `num_open`."""
    num_open -= 1
    first[k], last[k], parent[k] = first[num_open], last[num_open], parent[num_open]
    score[k], rank[k] = score[num_open], rank[num_open]
    return num_open


@compiled
def grow_tree(
    live_text: IntArray,
    sealed_text: IntArray,
    pool_text: IntArray,
    index: IndexArray,
    weight: FloatArray,
    favour: FloatArray,
    source: npt.NDArray[np.int8],
    size: int,
    budget: int,
    escape: float,
    max_branches: int,
    token_ids: IntArray,
    parents: IntArray,
    scores: FloatArray,
    sources: npt.NDArray[np.int8],
) -> int:
    """Write at most `budget` nodes; returns how many. Moves `index` along.

    An open child is a run first ... last - 1 of the occurrences, those that agree with its path; so there are never more
    children than occurrences. `escape` is the weight of something that has not been seen.
    """
    member = np.arange(size)
    follows = np.empty(size, np.int64)
    first, last, parent = np.empty(size, np.int64), np.empty(size, np.int64), np.empty(size, np.int64)
    score, rank = np.empty(size, np.float64), np.empty(size, np.float64)
    num_open = nodes = 0
    begin, end, node, probability = 0, size, -1, 1.0
    while True:
        total = escape
        for i in range(begin, end):
            m = member[i]
            if source[m] >= HISTORY:
                follows[m] = sealed_text[index[m]]
            elif source[m] == OTHER:
                follows[m] = pool_text[index[m]]
            else:
                follows[m] = live_text[index[m]]
            total += weight[m]
        before = num_open
        num_open = open_children(member, follows, weight, favour, begin, end, first, last, score, rank, num_open)
        for k in range(before, num_open):
            parent[k], share = node, min(score[k] / total, 1.0)  # sums of the same weights may differ in the last bit
            score[k], rank[k] = probability * share, rank[k] + 1e-6 * share  # votes decide between equals
        while num_open - before > max_branches:
            worst = before + int(rank[before:num_open].argmin())
            num_open = take_out(worst, first, last, parent, score, rank, num_open)
        if nodes == budget or num_open == 0:
            return nodes
        best = int(score[:num_open].argmax())
        begin, end, node, probability = first[best], last[best], nodes, score[best]
        heaviest = member[begin]
        for i in range(begin, end):
            m = member[i]
            index[m] += 1
            if weight[m] > weight[heaviest]:
                heaviest = m
        token_ids[nodes], parents[nodes] = follows[heaviest], parent[best]
        scores[nodes], sources[nodes] = probability, source[heaviest]
        nodes += 1
        num_open = take_out(best, first, last, parent, score, rank, num_open)
