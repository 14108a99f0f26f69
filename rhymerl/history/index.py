"""Suffix indexes: sealed ones over earlier answers, live ones over a prompt's answers that still grow.

Both answer one question: where else stand the longest suffixes of what has been generated so far?
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from rhymerl.history.suffixes import (
    BLOCK,
    Blocks,
    Matches,
    append,
    collect,
    insert_rows,
    positions_in_order,
    sorted_by_context,
    widen,
)
from rhymerl.types import IndexArray, IntArray

REACH = 32  # tokens of left context that are told apart; a power of two
NO_TOKEN = -1
_FIRST_WIDTH = 64  # tokens that a live answer has room for at first


class SuffixIndex:
    """Answers, sealed: `text`, 4 bytes a token, and its positions sorted by what stands before them, 4 more.

    Before each answer `text` repeats its prompt's last REACH tokens, so the first tokens of an answer have a
    context too; after it stands NO_TOKEN. `starts` [A] are the answers' first positions there.
    """

    def __init__(self, prompts: Sequence[IntArray], answers: Sequence[IntArray]) -> None:
        """Sort all positions without the GIL, at 0.1 us a token; `prompts` are those of the answers, one of each."""
        pieces: list[IntArray] = []
        behind = np.array([NO_TOKEN], np.int32)
        tails = {id(prompt): _tail(prompt) for prompt in prompts}  # a prompt mostly has several answers
        for prompt, answer in zip(prompts, answers, strict=True):
            pieces += [tails[id(prompt)], answer, behind]
        lengths = np.array([len(answer) for answer in answers], np.int64)
        self.text: IntArray = np.concatenate(pieces, dtype=np.int32) if pieces else np.empty(0, np.int32)
        self.starts = np.cumsum(lengths + REACH + 1) - lengths - 1
        self.num_tokens = int(lengths.sum())
        # The end of a prompt, an answer, NO_TOKEN; and one entry more.
        pieces_of = np.stack([np.full_like(lengths, REACH), lengths, np.ones_like(lengths)], axis=1).ravel()
        is_position = np.append(np.repeat(np.tile([False, True, False], len(lengths)), pieces_of), False)
        self._set_order(positions_in_order(sorted_by_context(self.text, REACH), is_position))

    def _set_order(self, positions: IntArray, *, spare: int = 0) -> None:
        """Cut sorted positions into blocks; with `spare` empty ones, half-filled, so that more can be put in."""
        per_block = BLOCK // 2 if spare else BLOCK
        used = max(-(-len(positions) // per_block), 1)
        self.blocks = Blocks(
            order=np.zeros((used + spare, BLOCK), np.int32),
            fill=np.zeros(used + spare, np.int32),
            sequence=np.arange(used + spare, dtype=np.int32),
            used=np.array([used], np.int64),
        )
        for block in range(used):
            piece = positions[block * per_block : (block + 1) * per_block]
            self.blocks.order[block, : len(piece)] = piece
            self.blocks.fill[block] = len(piece)

    @property
    def num_blocks(self) -> int:
        return int(self.blocks.used[0])

    @property
    def bytes(self) -> int:
        """The bytes of all arrays."""
        return sum(each.nbytes for each in (self.text, self.starts, *self.blocks))

    def matches(
        self, query: IntArray, ends: IndexArray, *, most: int, shortest: int = 1, longest: int = REACH
    ) -> Matches:
        """Return the `most` positions with the longest suffixes shared with the text before query[ends[r]].

        Shared suffixes have at least `shortest` tokens. Before every end there must be REACH entries in `query`. A
        shared suffix counts as `longest` tokens at most.
        """
        if not self.num_tokens:
            most = 0  # an index over nothing costs nothing
        found = Matches(
            positions=np.empty((len(ends), most), np.int32),
            lengths=np.empty((len(ends), most), np.int32),
            counts=np.zeros(len(ends), np.int32),
        )
        if most:
            collect(self.text, self.blocks, query, ends, longest, shortest, found)
        return found

    def check_integrity(self) -> None:
        """Raise AssertionError unless all positions are there once, in the order of their left contexts."""
        order, fill, sequence, _ = self.blocks
        listed = [order[block, : fill[block]] for block in sequence[: self.num_blocks]]
        assert self.num_blocks <= len(fill), "more blocks than there is room for"
        positions = np.concatenate(listed)
        assert len(positions) == self.num_tokens, f"{len(positions)} positions, {self.num_tokens} tokens"
        assert len(np.unique(positions)) == len(positions), "a position stands there twice"
        assert (self.text[positions] >= 0).all(), "a position without a token"
        contexts = [self.text[p - REACH : p][::-1].tolist() for p in positions]
        assert all(one <= two for one, two in pairwise(contexts)), "out of order"


class LiveIndex(SuffixIndex):
    """The prompt and the answers that are being generated for it, by row; row 0 is the prompt.

    What is appended can be read at once, behind a match too, and `catch_up` makes it part of what is found.
    """

    def __init__(self, prompt: IntArray) -> None:
        self._tail = _tail(prompt)
        region = [np.full(REACH, NO_TOKEN, np.int32), prompt, np.array([NO_TOKEN], np.int32)]
        self.text = np.concatenate(region, dtype=np.int32)
        self.num_tokens = len(prompt)
        self._rows_begin = len(self.text)
        self._width = REACH + _FIRST_WIDTH + 1
        self.starts = np.array([REACH], np.int64)
        self.ends = np.array([REACH + len(prompt)], np.int64)
        self._sorted_ends = self.ends.copy()  # positions before these are in the order
        self._behind: list[IndexArray] = []  # rows that have more
        self._num_behind = 0  # of their tokens
        is_position = np.zeros(len(self.text) + 1, np.bool_)
        is_position[REACH : REACH + len(prompt)] = True
        self._set_order(positions_in_order(sorted_by_context(self.text, REACH), is_position), spare=1)

    @property
    def bytes(self) -> int:
        return super().bytes + self.ends.nbytes + self._sorted_ends.nbytes + self._tail.nbytes

    def open(self) -> int:
        """Add an empty answer; return its row."""
        start = self._rows_begin + (len(self.starts) - 1) * self._width + REACH
        if start + self._width > len(self.text):
            more = np.empty(max(len(self.text), self._width), np.int32)
            self.text = np.concatenate([self.text, more])
        self.text[start - REACH : start] = self._tail
        self.text[start] = NO_TOKEN
        self.starts = np.append(self.starts, start)
        self.ends = np.append(self.ends, start)
        self._sorted_ends = np.append(self._sorted_ends, start)
        return len(self.starts) - 1

    def extend(self, rows: IndexArray, counts: IndexArray, token_ids: IntArray) -> None:
        """Append counts[r] of the concatenated `token_ids` to the answer of each row, and sort them in."""
        self.append(rows, counts, token_ids)
        self.catch_up()

    def append(self, rows: IndexArray, counts: IndexArray, token_ids: IntArray) -> None:
        """Append like `extend`, but let nothing be found at the new positions yet."""
        while not append(self.text, self.starts, self.ends, rows, counts, token_ids, self._width - REACH):
            self._widen()
        self._behind.append(rows)
        self._num_behind += len(token_ids)

    def catch_up(self) -> None:
        """Sort in what has been appended."""
        if not self._behind:
            return
        for rows in self._behind:
            while not insert_rows(self.text, self._sorted_ends, self.ends, rows, self.blocks, REACH):
                self._add_blocks()
        self.num_tokens += self._num_behind
        self._behind.clear()
        self._num_behind = 0

    def _widen(self) -> None:
        """Give every answer twice the room."""
        width = REACH + 2 * (self._width - REACH)
        num_rows = len(self.starts) - 1
        text = np.empty(self._rows_begin + max(num_rows, 1) * width, np.int32)
        text[: self._rows_begin] = self.text[: self._rows_begin]
        for row in range(num_rows):
            old, new = self._rows_begin + row * self._width, self._rows_begin + row * width
            text[new : new + self._width] = self.text[old : old + self._width]
        moved = np.arange(num_rows) * (width - self._width)
        self.starts[1:] += moved
        self.ends[1:] += moved
        self._sorted_ends[1:] += moved
        widen(self.blocks.order, self._rows_begin, self._width, width)
        self.text, self._width = text, width

    def _add_blocks(self) -> None:
        """Make half as many blocks more, and one."""
        order, fill, sequence, used = self.blocks
        more = len(fill) // 2 + 1
        self.blocks = Blocks(
            order=np.concatenate([order, np.zeros((more, BLOCK), np.int32)]),
            fill=np.concatenate([fill, np.zeros(more, np.int32)]),
            sequence=np.concatenate([sequence, np.zeros(more, np.int32)]),
            used=used,
        )


def _tail(prompt: IntArray) -> IntArray:
    """Return the prompt's last REACH tokens, filled up in front with NO_TOKEN."""
    last = np.asarray(prompt[-REACH:], np.int32)
    return np.concatenate([np.full(REACH - len(last), NO_TOKEN, np.int32), last])
