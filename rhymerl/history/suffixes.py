"""Compiled maths of the suffix index: positions of a text in the order of what stands before them.

A position p of a text is the gap before text[p]; its *left context* is text[p - 1], text[p - 2], ... read backwards, of
which the first `reach` tokens count. Sorted by left context, the positions that share the longest suffix
with a query lie next to where the query would be inserted, and the shared length only falls from there
outwards. Negative numbers are no tokens: a shared suffix ends at them, and a guess does too.

The sorted positions stand in blocks, so that one more is put in without moving them all.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from rhymerl.compiled import compiled
from rhymerl.types import BoolArray, IndexArray, IntArray

BLOCK = 256


class Blocks(NamedTuple):
    """Sorted positions in blocks of at most BLOCK; there may be more blocks than are in use."""

    order: IntArray  # [blocks, BLOCK]
    fill: IntArray  # [blocks] how many of each are in use
    sequence: IntArray  # [blocks] the blocks in their order
    used: IndexArray  # [1] how many blocks are


class Matches(NamedTuple):
    """The positions of suffixes of R queries, longest first. M = most positions a query; 0 in an empty index."""

    positions: IntArray  # [R, M] the token that followed is text[position]
    lengths: IntArray  # [R, M] tokens shared, at most REACH
    counts: IntArray  # [R] valid entries of each line


@compiled
def sorted_by_context(text: IntArray, reach: int) -> IntArray:
    """Return all indices q of `text`, sorted by the `reach` (a power of two) tokens that end at q, read backwards.

    Prefix doubling (Manber & Myers, 1993): positions sorted by h tokens are sorted by 2 h in one pass over the previous
    order. Positions before the text's begin are less than all others.
    """
    size = len(text)
    order = np.arange(size).astype(np.int32)
    other = np.empty(size, np.int32)
    largest = 0
    for q in range(size):
        largest = max(largest, text[q] + 1)
    shift = 0
    while shift == 0 or largest >> shift > 0:  # digits of 11 bits, the least significant first
        count = np.zeros(2049, np.int64)
        for q in range(size):
            count[(((text[q] + 1) >> shift) & 2047) + 1] += 1
        for digit in range(2048):
            count[digit + 1] += count[digit]
        for i in range(size):
            q = order[i]
            digit = ((text[q] + 1) >> shift) & 2047
            other[count[digit]] = q
            count[digit] += 1
        order, other = other, order
        shift += 11
    # A rank is the position of the first of its equals, so it also says where they are to be put.
    rank = np.empty(size, np.int32)
    first = 0
    for i in range(size):
        if i > 0 and text[order[i]] != text[order[i - 1]]:
            first = i
        rank[order[i]] = first
    head, finer = np.empty(size, np.int32), np.empty(size, np.int32)
    length = 1
    while length < reach:
        for i in range(size):
            head[i] = i
        for q in range(min(length, size)):
            other[head[rank[q]]] = q
            head[rank[q]] += 1
        for i in range(size):
            q = order[i] + length
            if q < size:
                other[head[rank[q]]] = q
                head[rank[q]] += 1
        order, other = other, order
        first = 0
        for i in range(size):
            q = order[i]
            if i > 0:
                p = order[i - 1]
                before_q = rank[q - length] if q >= length else -1
                before_p = rank[p - length] if p >= length else -1
                if rank[q] != rank[p] or before_q != before_p:
                    first = i
            finer[q] = first
        rank, finer = finer, rank
        length *= 2
    return order


@compiled
def shared_length(text: IntArray, p: int, other: IntArray, q: int, limit: int) -> int:
    """Return how many tokens the left contexts of `text` at p and `other` at q share, at most `limit`."""
    k = 0
    while k < limit and text[p - k - 1] == other[q - k - 1] and text[p - k - 1] >= 0:
        k += 1
    return k


@compiled
def insertion_point(text: IntArray, blocks: Blocks, query: IntArray, q: int, reach: int) -> tuple[int, int]:
    """Return (b, i): where `query` at q would be inserted, block and index.

    Every position before the i-th of the b-th block has a left context <= that of `query` at q, all others a greater
    one.
    """
    low, high = 0, blocks.used[0]  # the last block whose first position is not greater
    while high - low > 1:
        middle = (low + high) // 2
        p = blocks.order[blocks.sequence[middle], 0]
        k = shared_length(text, p, query, q, reach)
        if k == reach or text[p - k - 1] <= query[q - k - 1]:
            low = middle
        else:
            high = middle
    block = blocks.sequence[low]
    first, last = 0, blocks.fill[block]
    while first < last:
        middle = (first + last) // 2
        p = blocks.order[block, middle]
        k = shared_length(text, p, query, q, reach)
        if k == reach or text[p - k - 1] <= query[q - k - 1]:
            first = middle + 1
        else:
            last = middle
    return low, first


@compiled
def insert(text: IntArray, blocks: Blocks, begin: int, end: int, reach: int) -> int:
    """Put the positions begin ... end - 1 in, while there are spare blocks; return the first that is not in.

    A full block is split in two halves.
    """
    order, fill, sequence, used = blocks
    half = BLOCK // 2
    for p in range(begin, end):
        b, i = insertion_point(text, blocks, text, p, reach)
        block = sequence[b]
        if fill[block] == BLOCK - 1 and used[0] == len(fill):
            return p
        for j in range(fill[block], i, -1):
            order[block, j] = order[block, j - 1]
        order[block, i] = p
        fill[block] += 1
        if fill[block] == BLOCK:
            new = used[0]
            for j in range(half):
                order[new, j] = order[block, half + j]
            fill[block] = fill[new] = half
            for j in range(new, b + 1, -1):
                sequence[j] = sequence[j - 1]
            sequence[b + 1] = new
            used[0] += 1
    return end


@compiled
def collect(
    text: IntArray, blocks: Blocks, query: IntArray, ends: IndexArray, reach: int, shortest: int, found: Matches
) -> None:
    """Write, for each query end, as many positions of the longest shared suffixes as fit; `shortest` is at least 1."""
    order, fill, sequence = blocks.order, blocks.fill, blocks.sequence
    positions, lengths, num_blocks = found.positions, found.lengths, blocks.used[0]
    for r in range(len(ends)):
        q = ends[r]
        up, i = insertion_point(text, blocks, query, q, reach)
        down, j = up, i - 1  # the neighbours: (up, i) above, (down, j) below
        above = below = -1  # tokens shared with them; -1 = not looked at yet
        limit_above = limit_below = reach
        count = 0
        while count < positions.shape[1]:
            if above < 0:
                while up < num_blocks and i >= fill[sequence[up]]:
                    up, i = up + 1, 0
                above = 0
                if up < num_blocks:
                    above = shared_length(text, order[sequence[up], i], query, q, limit_above)
            if below < 0:
                while down > 0 and j < 0:
                    down -= 1
                    j = fill[sequence[down]] - 1
                below = 0
                if j >= 0:
                    below = shared_length(text, order[sequence[down], j], query, q, limit_below)
            if max(above, below) < shortest:
                break
            if above > below:
                positions[r, count], lengths[r, count] = order[sequence[up], i], above
                limit_above, above, i = above, -1, i + 1
            else:
                positions[r, count], lengths[r, count] = order[sequence[down], j], below
                limit_below, below, j = below, -1, j - 1
            count += 1
        found.counts[r] = count


@compiled
def positions_in_order(order: IntArray, is_position: BoolArray) -> IntArray:
    """Return positions sorted by left context, from indices sorted by what ends at them.

    `is_position` has one entry more.
    """
    out = np.empty(len(order) + 1, np.int32)
    count = 0
    if is_position[0]:
        out[0], count = 0, 1
    for i in range(len(order)):
        p = order[i] + 1
        if is_position[p]:
            out[count] = p
            count += 1
    return out[:count]


@compiled
def append(
    text: IntArray,
    starts: IndexArray,
    ends: IndexArray,
    rows: IndexArray,
    counts: IndexArray,
    token_ids: IntArray,
    room: int,
) -> bool:
    """Append tokens to the text's rows, whose ends move; False, and no change, if a row would reach `room` tokens."""
    for r in range(len(rows)):
        if ends[rows[r]] - starts[rows[r]] + counts[r] >= room:
            return False
    taken = 0
    for r in range(len(rows)):
        begin = ends[rows[r]]
        end = begin + counts[r]
        for i in range(counts[r]):
            text[begin + i] = token_ids[taken + i]
        text[end] = -1
        ends[rows[r]] = end
        taken += counts[r]
    return True


@compiled
def insert_rows(
    text: IntArray,
    sorted_ends: IndexArray,
    ends: IndexArray,
    rows: IndexArray,
    blocks: Blocks,
    reach: int,
) -> bool:
    """Put the positions of the rows from their `sorted_ends` to their `ends` in; False where a block is missing."""
    for row in rows:
        sorted_ends[row] = insert(text, blocks, sorted_ends[row], ends[row], reach)
        if sorted_ends[row] < ends[row]:
            return False
    return True


@compiled
def widen(order: IntArray, begin: int, width: int, wider: int) -> None:
    """Renumber positions from `begin` on when rows of `width` entries become `wider`."""
    for b in range(order.shape[0]):
        for i in range(order.shape[1]):
            p = order[b, i] - begin
            if p >= 0:
                order[b, i] = begin + p // width * wider + p % width
