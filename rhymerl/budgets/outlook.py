"""The outlook for drafts: their expected gain in batches of similar size, in this step and in earlier ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from rhymerl.costs import PassCost
from rhymerl.types import FloatArray

_NODES = np.array([0.25, 0.5, 1, 2, 4, 8, 16, 32])  # of a request, on average
_WEIGHT, _WEIGHT_OF_PROBE = 0.15, 0.3  # of what a pass says of the next ones
_MOST_TIMES = 2.0  # as much may a probe say of more nodes than it has
_LEAST = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """How many requests to draft for, the largest token weights first, and the expected speed-up over a plain pass."""

    gain: float
    num_asked: int


class Outlook:
    """The expected tokens per request from so many nodes, on average over drafted requests, by batch size.

    Sizes are powers of two. One that has not been seen is held to be like the nearest.
    """

    def __init__(self) -> None:
        self._tokens: dict[int, FloatArray] = {}  # by size, and by _NODES

    @property
    def is_known(self) -> bool:
        return bool(self._tokens)

    def learn(self, rows: int, expected: FloatArray, asked: int, *, probed: int | None = None) -> None:
        """Learn `expected` [nodes + 1], the tokens of all `asked` requests by how many of the best nodes are verified.

        A probe had `probed` nodes of each; of more it says how much better or worse they are than they were.
        """
        new, before = np.interp(_NODES, np.arange(len(expected)) / asked, expected / asked), self._of(rows)
        if before is None:
            before = new
        elif probed is not None:
            last = int(np.searchsorted(_NODES, probed))
            times = min(new[last] / max(before[last], _LEAST), _MOST_TIMES)
            new[last:] = new[last] + times * (before[last:] - before[last])
        weight = _WEIGHT if probed is None else _WEIGHT_OF_PROBE
        self._tokens[_size(rows)] = (1 - weight) * before + weight * new

    def _of(self, rows: int) -> FloatArray | None:
        size = _size(rows)
        return self._tokens[min(self._tokens, key=lambda each: (abs(each - size), -each))] if self._tokens else None

    def best(
        self,
        rows: int,
        cost: PassCost,
        *,
        weights: FloatArray | None = None,
        computed: Callable[[FloatArray, FloatArray], FloatArray],
    ) -> Choice:
        """Return the best choice for a pass over `rows` requests with token weights [rows] (None: all equal).

        `computed` says how many nodes a pass computes, by the requests that have some and the nodes of each. Who is
        asked for need not have any, so where asking costs nothing all are.
        """
        tokens = self._of(rows)
        if tokens is None:
            return Choice(gain=1.0, num_asked=rows)
        worth = np.arange(1.0, rows + 1) if weights is None else np.cumsum(np.sort(weights)[::-1])
        counts = np.array([rows]) if weights is None else np.unique(np.minimum(2 ** np.arange(_size(rows) + 2), rows))
        drafted, nodes = np.repeat(counts, len(_NODES)), np.tile(_NODES, len(counts))
        plain, *asking = cost.seconds(rows, np.zeros(len(counts) + 1), np.array([0, *counts])).tolist()
        made = 1 + worth[drafted - 1] * np.tile(tokens, len(counts)) / rows
        seconds = cost.seconds(rows, computed(drafted, nodes), 0)
        gains = (
            np.array(
                [
                    float((made / (seconds + more - plain))[drafted <= asked].max())
                    for asked, more in zip(counts.tolist(), asking, strict=True)
                ]
            )
            * plain
        )
        best = int(np.flatnonzero(gains == gains.max())[-1])
        return Choice(gain=float(gains[best]), num_asked=int(counts[best]))

    def state_dict(self) -> dict[str, Any]:
        """Return the state in plain containers."""
        return {"sizes": {size: tokens.tolist() for size, tokens in self._tokens.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state."""
        self._tokens = {int(size): np.array(tokens) for size, tokens in state["sizes"].items()}


def _size(rows: int) -> int:
    return rows.bit_length() - 1
