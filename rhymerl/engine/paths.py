"""What comes before each token of a pass, for layers that go from token to token instead of looking at keys."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rhymerl.compiled import compiled
from rhymerl.engine.layout import PassLayout
from rhymerl.types import BoolArray, IndexArray, IntArray

_BLOCK = 64  # tokens of a chain that are computed at once


@dataclass(frozen=True, slots=True, kw_only=True)
class PathBlock:
    """Tokens of B rows side by side, padded to T. They go on from the states of the rows `source`."""

    row: Tensor  # [B]
    source: Tensor  # [B] -1 = there is nothing before
    tokens: Tensor  # [B, T] indices into the packed pass
    real: Tensor  # [B, T] False = padding
    sees: Tensor  # [B or 1, T, T] which tokens are on the path of each, itself among them


class PassPaths:
    """The paths of a `PassLayout`: F rows feed a chain each, below which K draft nodes hang. Made when asked for."""

    def __init__(self, layout: PassLayout, device: torch.device) -> None:
        self._layout = layout
        self._device = device
        self._windows: dict[int, Tensor] = {}
        width = layout.chain.copy()
        width[layout.emits] += layout.drafts.counts
        self._first = np.cumsum(width) - width  # [F]
        self._last = self._first + layout.chain - 1  # [F] of the chain
        feeds = {row: index for index, row in enumerate(layout.row.tolist())}
        same = zip(layout.source.tolist(), layout.row.tolist(), strict=True)
        # [F] which row of the pass is the prefix behind which this one enters, or -1
        self._behind = np.array([-1 if source == row else feeds.get(source, -1) for source, row in same])
        self.row, self.source, self.last = map(self._there, (layout.row, layout.source, self._last))
        self.nodes = self._there(layout.node_index) if len(layout.node_index) else None

    def _there(self, array: npt.NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(self._device)

    @cached_property
    def chains(self) -> list[PathBlock]:
        """The chains in blocks, each after those that it goes on from."""
        return list(self._chains())

    def _chains(self) -> Iterator[PathBlock]:
        layout = self._layout
        for rows in (np.flatnonzero(self._behind < 0), np.flatnonzero(self._behind >= 0)):
            for begin in range(0, int(layout.chain[rows].max(initial=0)), _BLOCK):
                some = rows[layout.chain[rows] > begin]
                column = np.arange(begin, min(begin + _BLOCK, int(layout.chain[some].max())))
                tokens = self._first[some, None] + column
                yield PathBlock(
                    row=self._there(layout.row[some]),
                    source=self._there((layout.row if begin else layout.source)[some]),
                    tokens=self._there(np.minimum(tokens, layout.num_tokens - 1)),
                    real=self._there(tokens <= self._last[some, None]),
                    sees=torch.ones(1, len(column), len(column), dtype=torch.bool, device=self._device).tril(),
                )

    @cached_property
    def trees(self) -> PathBlock | None:
        """The drafts, which go on from their rows' chains; None where there are none."""
        layout, drafts = self._layout, self._layout.drafts
        if not len(layout.node_index):
            return None
        some, widest = np.flatnonzero(drafts.counts), int(drafts.counts.max())
        sees = np.zeros((len(layout.emits), widest, widest), np.bool_)
        _fill_paths(drafts.parents, drafts.starts, sees)
        row, column = self._there(layout.emitting[some]), np.arange(widest)
        nodes = np.minimum(drafts.starts[some, None] + column, len(layout.node_index) - 1)
        return PathBlock(
            row=row,
            source=row,
            tokens=self._there(layout.node_index[nodes]),
            real=self._there(column < drafts.counts[some, None]),
            sees=self._there(sees[some]),
        )

    def windows(self, width: int) -> Tensor:
        """Return the last tokens up to each, itself among them: [N, width] numbers.

        They count the `width` - 1 last inputs of each row's state first, row by row, and then the tokens of the pass.
        """
        if width not in self._windows:
            self._windows[width] = self._there(self._last_tokens(width))
        return self._windows[width]

    def _last_tokens(self, width: int) -> IndexArray:
        layout, kept = self._layout, width - 1
        num_kept = kept * len(layout.row)
        before = np.arange(num_kept + layout.num_tokens) - 1
        of_rows = np.arange(len(layout.row))
        before[num_kept + self._first] = np.where(
            self._behind < 0, kept * (of_rows + 1) - 1, num_kept + self._last[self._behind]
        )
        drafts, owner = layout.drafts, layout.logit_row[layout.logit_level > 0]
        above = layout.node_index[np.maximum(drafts.starts[owner] + drafts.parents, 0)]
        above = np.where(drafts.parents < 0, self._last[layout.emits[owner]], above)
        before[num_kept + layout.node_index] = num_kept + above
        found = np.empty((width, layout.num_tokens), np.int64)
        found[-1] = num_kept + np.arange(layout.num_tokens)
        for column in reversed(range(kept)):
            found[column] = before[found[column + 1]]
        return np.ascontiguousarray(found.T)


@compiled
def _fill_paths(parents: IntArray, starts: IndexArray, sees: BoolArray) -> None:
    """Mark itself and its ancestors for each node of each tree."""
    for e in range(len(starts) - 1):
        for node in range(starts[e + 1] - starts[e]):
            here = node
            while here >= 0:
                sees[e, node, here] = True
                here = parents[starts[e] + here]
