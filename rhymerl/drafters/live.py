"""The running answers to one prompt, indexed as they grow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from rhymerl.history.index import LiveIndex
from rhymerl.types import Completion, RolloutRequest

if TYPE_CHECKING:
    from rhymerl.types import IndexArray, IntArray


class LiveGroup:
    """A prompt's live index and whose answer is in which of its rows; what has ended stays there for the others."""

    def __init__(self, prompt: IntArray) -> None:
        self.prompt = prompt
        self.index = LiveIndex(prompt)
        self.running: dict[str, int] = {}  # row by request id
        self._left: dict[str, int] = {}
        self._ended: list[tuple[int, IntArray]] = []  # rows and whole answers, to be indexed when next somebody asks

    def start(self, request: RolloutRequest) -> None:
        """Give the request a row: its former one if it goes on from there, else a new one."""
        if request.id in self._left:
            self._catch_up()
        row = self._left.pop(request.id, None)
        brings = len(request.generated) if request.generated else 0
        if row is None or self._num_tokens(row) > brings:
            row = self.index.open()
        self.running[request.id] = row

    def extend(self, ids: Sequence[str], contexts: Sequence[IntArray]) -> IndexArray:
        """Index what each context (prompt and response so far) has that its row lacks; returns the rows."""
        self._catch_up()
        rows = np.array([self.running[each] for each in ids], np.int64)
        known = (len(self.prompt) + self.index.ends[rows] - self.index.starts[rows]).tolist()
        new = [context[length:] for context, length in zip(contexts, known, strict=True)]
        counts = np.array([len(tokens) for tokens in new], np.int64)
        if counts.any():
            self.index.extend(rows, counts, np.concatenate(new))
        return rows

    def finish(self, completion: Completion) -> None:
        """The request has left with these tokens."""
        row = self._left[completion.request.id] = self.running.pop(completion.request.id)
        self._ended.append((row, completion.token_ids))

    def _catch_up(self) -> None:
        """While the drafter is left alone, answers that end cost nothing."""
        for row, answer in self._ended:
            new = answer[self._num_tokens(row) :]
            if len(new):
                self.index.extend(np.array([row]), np.array([len(new)]), np.array(new, np.int32))
        self._ended.clear()

    def _num_tokens(self, row: int) -> int:
        return int(self.index.ends[row] - self.index.starts[row])
