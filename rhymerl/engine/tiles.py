"""What a pass's tokens see, for engine/triton_attention.py: their row's slots up to the root, ancestors as bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rhymerl.compiled import compiled
from rhymerl.drafts import DraftBatch
from rhymerl.engine.rows import Rows
from rhymerl.types import IndexArray, IntArray

MOST_NODES = 63  # of a row's draft: as many bits as an int64 has beside its sign
_MOST_SPLITS = 16
_LONG = 1024  # keys of a row: of fewer, a merge costs what its parts save


@dataclass(frozen=True, slots=True, kw_only=True)
class TileLayout:
    """The N tokens of a pass in T tiles of at most `most` tokens of one row each.

    A tile is five numbers: its first token, how many it has, where its row begins in `kv_slots`, keys up to the root,
    keys to look at. A token sees the keys up to its position and the root, and its ancestors.
    """

    tiles: npt.NDArray[np.int32]  # [T, 5]
    ancestors: npt.NDArray[np.int64]  # [N] bit k: it sees the row's draft node k
    kv_slots: npt.NDArray[np.int32]  # the slots of all rows, one row after another
    most: int

    @property
    def arrays(self) -> list[npt.NDArray[Any]]:
        """Return tiles, ancestors and slots, which a device needs."""
        return [self.tiles, self.ancestors, self.kv_slots]

    def splits(self, num_programs: int, num_processors: int) -> int:
        """Return in how many parts, a power of 2, keys are computed so that programs keep a GPU's processors busy.

        For a number of programs there are two values, for short rows and for long ones: few CUDA graphs differ in it.
        """
        if self.tiles[:, 4].max() < _LONG:
            return 1
        return 1 << max(min(num_processors // num_programs, _MOST_SPLITS), 1).bit_length() - 1


def tile(
    rows: Rows,
    row: IndexArray,
    chain: IndexArray,
    width: IndexArray,
    emits: IndexArray,
    drafts: DraftBatch,
    *,
    most: int,
) -> TileLayout | None:
    """Return the tiles of a pass, whose slots the rows know already; None if a draft has more nodes than bits."""
    if len(drafts.counts) and drafts.counts.max() > MOST_NODES:
        return None
    start = np.zeros(len(row), np.int64)
    start[emits] = drafts.starts[:-1]
    tiles = np.empty((int((-(-width // most)).sum()), 5), np.int32)
    ancestors = np.empty(int(width.sum()), np.int64)
    kv_slots = np.empty(int((rows.cached[row] + width).sum()), np.int32)
    _fill(rows.slots, rows.cached, row, chain, width, start, drafts.parents, most, tiles, ancestors, kv_slots)
    return TileLayout(tiles=tiles, ancestors=ancestors, kv_slots=kv_slots, most=most)


@compiled
def _fill(
    row_slots: IndexArray,
    cached: IndexArray,
    row: IndexArray,
    chain: IndexArray,
    width: IndexArray,
    start: IndexArray,
    parents: IntArray,
    most: int,
    tiles: npt.NDArray[np.int32],
    ancestors: npt.NDArray[np.int64],
    kv_slots: npt.NDArray[np.int32],
) -> None:
    """Write a `TileLayout`: a row feeds `chain` tokens and a draft with nodes from `start`, `width` in all."""
    n, t, begin = 0, 0, 0
    for f in range(len(row)):
        before, root = cached[row[f]], cached[row[f]] + chain[f]
        num_keys = before + width[f]
        for key in range(num_keys):
            kv_slots[begin + key] = row_slots[row[f], key]
        for each in range(width[f]):
            if each % most == 0:
                count = min(most, width[f] - each)
                last = before + each + count
                tiles[t, 0], tiles[t, 1], tiles[t, 2], tiles[t, 3], tiles[t, 4] = n + each, count, begin, root, last
                t += 1
            node = each - chain[f]
            ancestors[n + each] = 0
            if node >= 0:  # ancestors come first
                above = parents[start[f] + node]
                bits = ancestors[n + chain[f] + above] if above >= 0 else 0
                ancestors[n + each] = bits | (np.int64(1) << np.int64(node))
        n += width[f]
        begin += num_keys
