"""Compiled: grow a draft tree from the positions of a context's suffixes, the most probable node first.

Every occurrence votes for the token that followed it, with a weight that grows with the length of the shared suffix. A
node keeps the occurrences that agree with its path, so its children's probabilities come from what followed there.
"""

from __future__ import annotations

from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

from rhymerl.compiled import compiled
from rhymerl.drafts import DraftBatch, DraftSource
from rhymerl.types import FloatArray, IndexArray, IntArray

OWN, SIBLING, OTHER, HISTORY = (
    int(each) for each in (DraftSource.OWN, DraftSource.SIBLING, DraftSource.OTHER, DraftSource.HISTORY)
)
MOST_AGE = 127 - HISTORY  # sources are int8; what is older counts as this old there


class Occurrences(NamedTuple):
    """A text, and the positions in it at which suffixes of R queries stand (history/suffixes.py)."""

    text: IntArray
    starts: IndexArray  # of its regions
    positions: IntArray  # [R, M]
    lengths: IntArray  # [R, M] tokens shared
    counts: IntArray  # [R] valid entries of each line


class AnswerWeights(NamedTuple):
    """The earlier answers, [A], which are the regions of their text."""

    weights: FloatArray
    rewards: FloatArray
    ages: IntArray


class Rules(NamedTuple):
    """The settings of a drafter."""

    use_own: bool
    use_siblings: bool
    pool_weight: float  # of each answer there
    length_weight: float
    escape: float  # the weight of something that has not been seen
    max_branches: int
    by_reward: bool  # when there are more branches, rewards decide between them


class Nodes(NamedTuple):
    """The nodes of a tree, or of many: [N], or [L, most] where each has a line of its own."""

    token_ids: IntArray
    parents: IntArray
    scores: FloatArray
    sources: npt.NDArray[np.int8]

    @classmethod
    def empty(cls, *shape: int) -> Self:
        token_ids, parents = np.empty((2, *shape), np.int32)
        return cls(token_ids, parents, np.empty(shape), np.empty(shape, np.int8))


class Trees(NamedTuple):
    """Room for L trees, one a line, of at most `most` nodes; `grow_trees` fills it, `packed` makes a batch of it."""

    nodes: Nodes
    counts: IndexArray  # [L]
    longest: IntArray  # [L] tokens of the longest match

    @classmethod
    def empty(cls, num_lines: int, most: int) -> Self:
        return cls(Nodes.empty(num_lines, most), np.zeros(num_lines, np.int64), np.zeros(num_lines, np.int32))

    def packed(self) -> DraftBatch:
        """Return the drafts in the order of the lines."""
        starts = np.zeros(len(self.counts) + 1, np.int64)
        self.counts.cumsum(out=starts[1:])
        nodes = Nodes.empty(int(starts[-1]))
        _join(self.nodes, starts, nodes)
        return DraftBatch(**nodes._asdict(), starts=starts, match_length=self.longest)


@compiled
def _join(lines: Nodes, starts: IndexArray, nodes: Nodes) -> None:
    """Join lines [L, most] one behind the other."""
    for line in range(len(starts) - 1):
        for index in range(starts[line], starts[line + 1]):
            node = index - starts[line]
            nodes.token_ids[index], nodes.parents[index] = lines.token_ids[line, node], lines.parents[line, node]
            nodes.scores[index], nodes.sources[index] = lines.scores[line, node], lines.sources[line, node]


@compiled
def region_of(starts: IndexArray, position: int) -> int:
    """Return the last region that starts at or before the position."""
    region, left = 0, len(starts)
    while left > 1:  # without branches, which nothing could predict
        half = left // 2
        region += half * (starts[region + half] <= position)
        left -= half
    return region


@compiled
def grow_trees(
    live: Occurrences,
    sealed: Occurrences,
    pool: Occurrences,
    answers: AnswerWeights,
    rules: Rules,
    rows: IndexArray,
    budgets: IntArray,
    lines: IndexArray,
    trees: Trees,
) -> None:
    """Draft for the queries r of one prompt, from their matches in its live and its sealed index, and in the pool.

    `rows` [R] are the queries' own rows of the live text (row 0 is the prompt). Line lines[r] of the `trees` gets at
    most budgets[lines[r]] nodes. `answers` are the sealed index's.
    """
    most = live.positions.shape[1] + sealed.positions.shape[1] + pool.positions.shape[1]
    index, shared = np.empty(most, np.int64), np.empty(most, np.int64)
    weight, favour = np.empty(most, np.float64), np.empty(most, np.float64)
    source = np.empty(most, np.int8)
    for r in range(len(rows)):
        size = 0
        for i in range(live.counts[r]):
            region = region_of(live.starts, live.positions[r, i])
            own = region == rows[r] or region == 0
            if rules.use_own if own else rules.use_siblings:
                index[size], shared[size] = live.positions[r, i], live.lengths[r, i]
                weight[size], favour[size] = 1.0, 0.0
                source[size] = OWN if own else SIBLING
                size += 1
        for i in range(sealed.counts[r]):
            region = region_of(sealed.starts, sealed.positions[r, i])
            index[size], shared[size] = sealed.positions[r, i], sealed.lengths[r, i]
            weight[size] = answers.weights[region]
            favour[size] = answers.rewards[region] if rules.by_reward else 0.0
            source[size] = HISTORY + min(answers.ages[region], MOST_AGE)
            size += 1
        for i in range(pool.counts[r]):
            index[size], shared[size] = pool.positions[r, i], pool.lengths[r, i]
            weight[size], favour[size] = rules.pool_weight, 0.0
            source[size] = OTHER
            size += 1
        top = 0
        for i in range(size):
            top = max(top, shared[i])
        for i in range(size):
            weight[i] *= rules.length_weight ** (shared[i] - top)
        line, nodes = lines[r], trees.nodes
        tree = Nodes(nodes.token_ids[line], nodes.parents[line], nodes.scores[line], nodes.sources[line])
        trees.longest[line] = top
        trees.counts[line] = grow_tree(
            live.text, sealed.text, pool.text, index, weight, favour, source, size, budgets[line], rules, tree
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
    """Group equal tokens of the occurrences begin ... end - 1 and append each run with its sums; return `num_open`."""
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
    rules: Rules,
    tree: Nodes,
) -> int:
    """Write at most `budget` nodes; returns how many. Moves `index` along.

    An open child is a run first ... last - 1 of the occurrences, those that agree with its path; so there are never
    more children than occurrences.
    """
    member = np.arange(size)
    follows = np.empty(size, np.int64)
    first, last, parent = np.empty(size, np.int64), np.empty(size, np.int64), np.empty(size, np.int64)
    score, rank = np.empty(size, np.float64), np.empty(size, np.float64)
    num_open = nodes = 0
    begin, end, node, probability = 0, size, -1, 1.0
    while True:
        total = rules.escape
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
        while num_open - before > rules.max_branches:
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
        tree.token_ids[nodes], tree.parents[nodes] = follows[heaviest], parent[best]
        tree.scores[nodes], tree.sources[nodes] = probability, source[heaviest]
        nodes += 1
        num_open = take_out(best, first, last, parent, score, rank, num_open)
