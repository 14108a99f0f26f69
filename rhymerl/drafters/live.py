"""The running answers to one prompt, indexed as they grow."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rhymerl.history.index import LiveIndex
from rhymerl.types import Completion, IndexArray, IntArray


class LiveGroup:
    """A prompt's live index and the row of each request; ended answers stay there for the others.

    A request has a row from when it first asks for a draft.
    """

    def __init__(self, prompt: IntArray) -> None:
        self.prompt = prompt
        self.index = LiveIndex(prompt)
        self.running: dict[str, int] = {}  # row by request id
        self._lengths = [len(prompt)]  # by row: reading them from the index takes longer
        self._left: dict[str, int] = {}
        # Request ids, rows (None for who never asked) and whole answers, to be taken up when next somebody asks.
        self._ended: list[tuple[str, int | None, IntArray]] = []

    def extend(self, ids: Sequence[str], contexts: Sequence[IntArray]) -> IndexArray:
        """Append what each context (prompt, response) has beyond its row, from `catch_up` on; return the rows."""
        self._take_up_ended()
        prompt_length, lengths, running = len(self.prompt), self._lengths, self.running
        rows: list[int] = []
        new: list[IntArray] = []
        for name, context in zip(ids, contexts, strict=True):
            row = running.get(name)
            if row is None:
                row = running[name] = self._row_of(name, context[prompt_length:])
            rows.append(row)
            new.append(context[prompt_length + lengths[row] :])
        found = np.array(rows, np.int64)
        self._append(found, new)
        return found

    def _append(self, rows: IndexArray, new: Sequence[IntArray]) -> None:
        counts = [len(tokens) for tokens in new]
        if not any(counts):
            return
        for row, count in zip(rows.tolist(), counts, strict=True):
            self._lengths[row] += count
        self.index.append(rows, np.array(counts, np.int64), np.concatenate(new, dtype=np.int32))

    def _row_of(self, name: str, response: IntArray) -> int:
        """Return the request's former row if it goes on from there, else a new one."""
        row = self._left.pop(name, None)
        if row is not None:
            start, length = int(self.index.starts[row]), self._lengths[row]
            if np.array_equal(self.index.text[start : start + length], response[:length]):
                return row
        self._lengths.append(0)
        return self.index.open()

    def finish(self, completion: Completion) -> None:
        """Note that the request has left with these tokens."""
        row = self.running.pop(completion.request.id, None)
        self._ended.append((completion.request.id, row, completion.token_ids))

    def catch_up(self) -> None:
        """Index all that has been appended."""
        self.index.catch_up()

    def _take_up_ended(self) -> None:
        """Take up ended answers only when somebody asks again, so that an idle drafter costs nothing."""
        for name, row, answer in self._ended:
            at = self._left[name] = self._row_of(name, answer) if row is None else row
            self._append(np.array([at]), [answer[self._lengths[at] :]])
        self._ended.clear()
