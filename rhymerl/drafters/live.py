"""The running answers to one prompt, indexed as they grow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from rhymerl.history.index import LiveIndex
from rhymerl.types import Completion

if TYPE_CHECKING:
    from rhymerl.types import IndexArray, IntArray


class LiveGroup:
    """A prompt's live index and whose answer is in which of its rows; what has ended stays there for the others.

    A request has a row from when it first asks for a draft.
    """

    def __init__(self, prompt: IntArray) -> None:
        self.prompt = prompt
        self.index = LiveIndex(prompt)
        self.running: dict[str, int] = {}  # row by request id
        self._left: dict[str, int] = {}
        # Request ids, rows (None for who never asked) and whole answers, to be indexed when next somebody asks.
        self._ended: list[tuple[str, int | None, IntArray]] = []

    def extend(self, ids: Sequence[str], contexts: Sequence[IntArray]) -> IndexArray:
        """Index what each context (prompt and response so far) has that its row lacks; returns the rows."""
        self._catch_up()
        length = len(self.prompt)
        for name, context in zip(ids, contexts, strict=True):
            if name not in self.running:
                self.running[name] = self._row_of(name, context[length:])
        rows = np.array([self.running[each] for each in ids], np.int64)
        known = (length + self.index.ends[rows] - self.index.starts[rows]).tolist()
        new = [context[count:] for context, count in zip(contexts, known, strict=True)]
        counts = np.array([len(tokens) for tokens in new], np.int64)
        if counts.any():
            self.index.extend(rows, counts, np.concatenate(new))
        return rows

    def _row_of(self, name: str, response: IntArray) -> int:
        """Return the request's former row if it goes on from there, else a new one."""
        row = self._left.pop(name, None)
        if row is not None:
            start, end = int(self.index.starts[row]), int(self.index.ends[row])
            if np.array_equal(self.index.text[start:end], response[: end - start]):
                return row
        return self.index.open()

    def finish(self, completion: Completion) -> None:
        """The request has left with these tokens."""
        row = self.running.pop(completion.request.id, None)
        self._ended.append((completion.request.id, row, completion.token_ids))

    def _catch_up(self) -> None:
        """Answers that have ended are indexed when somebody asks again: they cost nothing while the drafter is left alone."""
        for name, row, answer in self._ended:
            at = self._left[name] = self._row_of(name, answer) if row is None else row
            new = answer[int(self.index.ends[at] - self.index.starts[at]) :]
            if len(new):
                self.index.extend(np.array([at]), np.array([len(new)]), np.array(new, np.int32))
        self._ended.clear()
