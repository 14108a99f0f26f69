"""The prefix table: each prompt's shared part has one row, which all samples of the prompt read."""

from __future__ import annotations

import numpy as np

from rhymerl.engine.rows import Prefix, Rows
from rhymerl.types import IndexArray, RolloutRequest


class PrefixTable:
    """Prefixes by their tokens. A prefix that nobody reads stays until its row or its slots are needed."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._prefixes: dict[bytes, Prefix] = {}  # the least recently used one first
        self._uncomputed: list[Prefix] = []

    @property
    def held(self) -> list[int]:
        """The rows of all prefixes."""
        return [prefix.row for prefix in self._prefixes.values()]

    def acquire(self, request: RolloutRequest) -> Prefix | None:
        """Return the prefix of the request: all its prompt but the last token, or None for a prompt of one token.

        Afterwards a row is free for the request itself.
        """
        tokens = request.prompt.token_ids[:-1]
        prefix = self._prefixes.pop(tokens.tobytes(), None)  # out of the table, so that it cannot be evicted
        is_new = prefix is None and len(tokens) > 0
        while self._rows.num_free < 1 + is_new and self.evict_idle():
            pass
        if is_new:
            prefix = self._rows.enter_prefix(tokens, request)
            self._uncomputed.append(prefix)
        if prefix is not None:
            self._prefixes[prefix.tokens] = prefix
        return prefix

    def uncomputed(self) -> list[int]:
        """Return the rows of prefixes that still have to be computed."""
        rows = self._rows
        self._uncomputed = [each for each in self._uncomputed if rows.cached[each.row] < rows.length[each.row]]
        return [prefix.row for prefix in self._uncomputed]

    def idle_slots(self) -> int:
        """Return the number of slots in prefixes that nobody reads."""
        return sum(len(self._rows.owned(each.row)) for each in self._prefixes.values() if each.num_readers == 0)

    def evict_idle(self) -> bool:
        """Free the least recently used prefix that nobody reads; returns whether there was one."""
        idle = next((prefix for prefix in self._prefixes.values() if prefix.num_readers == 0), None)
        if idle is not None:
            self._evict(idle)
        return idle is not None

    def leave(self, row: int) -> None:
        """Free the row of a request; its prefix, for which nobody may wait any more, is then not computed."""
        prefix = self._rows.prefix[row]
        self._rows.leave(row)
        if prefix is None or prefix.num_readers:
            return
        if self._rows.cached[prefix.row] < self._rows.length[prefix.row]:
            self._evict(prefix)

    def clear(self) -> None:
        """Free all prefixes, which nobody reads."""
        for prefix in list(self._prefixes.values()):
            self._evict(prefix)

    def _evict(self, prefix: Prefix) -> None:
        del self._prefixes[prefix.tokens]
        self._uncomputed = [each for each in self._uncomputed if each is not prefix]
        self._rows.leave(prefix.row)

    def owed(self, running: IndexArray | list[int]) -> int:
        """Return how many tokens of the running rows and of all prefixes have no keys and values yet."""
        held = np.array([*running, *self.held], np.int64)
        return int((self._rows.length[held] - self._rows.cached[held]).sum())
