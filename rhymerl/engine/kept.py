"""Rows that stay though their turn is over: an episode's next turn goes on from their keys and values."""

from __future__ import annotations

import numpy as np

from rhymerl.engine.prefixes import PrefixTable
from rhymerl.engine.rows import Rows
from rhymerl.types import IntArray, RolloutRequest


class KeptRows:
    """Rows that wait for their environment, by request id, until they resume, are forgotten, or lose their room."""

    def __init__(self, rows: Rows, prefixes: PrefixTable) -> None:
        self._rows = rows
        self._prefixes = prefixes
        self._row_of: dict[str, int] = {}  # the one that has waited longest first

    @property
    def held(self) -> list[int]:
        """The rows."""
        return list(self._row_of.values())

    @property
    def num_slots(self) -> int:
        """The slots that could be had from them."""
        return sum(int(self._rows.cached[row] - self._rows.shared[row]) for row in self._row_of.values())

    def keep(self, row: int) -> None:
        """The request in this row has left it, and may go on."""
        name = self._rows.id(row)
        self._rows.rest(row)
        self._row_of[name] = row

    def take(self, request: RolloutRequest) -> int | None:
        """Return the row in which a request goes on, None where it has none; it is kept no more."""
        row = self._row_of.pop(request.id, None)
        if row is not None and not self._begins(request, self._rows.tokens[row, : self._rows.length[row]]):
            self._prefixes.leave(row)  # another request of that name
            return None
        return row

    def forget(self, name: str) -> None:
        """A request does not go on."""
        if name in self._row_of:
            self._prefixes.leave(self._row_of.pop(name))

    def evict(self) -> bool:
        """Free the row that has waited longest; returns whether there was one."""
        name = next(iter(self._row_of), None)
        if name is not None:
            self.forget(name)
        return name is not None

    def clear(self) -> None:
        """Free all of them."""
        while self.evict():
            pass

    @staticmethod
    def _begins(request: RolloutRequest, tokens: IntArray) -> bool:
        prompt, output = request.prompt.token_ids, request.output
        own = prompt if output is None else np.concatenate([prompt, output.token_ids])
        return len(own) > len(tokens) and np.array_equal(own[: len(tokens)], tokens)
