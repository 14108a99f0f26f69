"""The outlook for drafts in a batch of another size, from what they were expected to bring in the last ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from rhymerl.costs import PassCost
    from rhymerl.types import FloatArray

_NODES = np.array([0.0, 0.25, 0.5, 1, 2, 4, 8, 16, 32])  # of a request, on average
_LATELY = 0.7


class Outlook:
    """Tokens that so many nodes a request are expected to add to each, on average over the running requests."""

    def __init__(self) -> None:
        self._tokens: FloatArray | None = None  # by _NODES

    def learn(self, expected: FloatArray, rows: int) -> None:
        """`expected` [nodes + 1] are the tokens of all `rows` together by how many of the best nodes are verified."""
        tokens = np.interp(_NODES, np.arange(len(expected)) / rows, expected / rows)
        self._tokens = tokens if self._tokens is None else _LATELY * self._tokens + (1 - _LATELY) * tokens

    def gain(self, rows: int, cost: PassCost, *, least: float) -> float:
        """Return the best speed-up over a pass without drafts, in tokens a second, for `rows` requests.

        The result is 1 where it is certainly not more than `least`.
        """
        if self._tokens is None or 1 + self._tokens[-1] <= least:
            return 1.0
        plain = float(cost.seconds(rows, np.zeros(1), 0)[0])
        return float((plain * (1 + self._tokens) / cost.seconds(rows, rows * _NODES, rows)).max())

    def state_dict(self) -> dict[str, Any]:
        """Return the state in plain containers."""
        return {"tokens": None if self._tokens is None else self._tokens.tolist()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state."""
        self._tokens = None if state["tokens"] is None else np.array(state["tokens"])
