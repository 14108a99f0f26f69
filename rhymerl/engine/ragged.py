"""Index arithmetic for ragged batches: `counts` items a row, laid end to end."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

IndexArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ragged:
    """`ragged([2, 0, 3])` has row = [0, 0, 2, 2, 2], offset = [0, 1, 0, 1, 2], start = [0, 2, 2]."""

    row: IndexArray  # [total]
    offset: IndexArray  # [total]
    start: IndexArray  # [rows]

    @property
    def total(self) -> int:
        return len(self.row)


def ragged(counts: IndexArray) -> Ragged:
    """Return the row, the offset within its row, and the start of every row."""
    start = np.cumsum(counts) - counts
    row = np.repeat(np.arange(len(counts)), counts)
    return Ragged(row=row, offset=np.arange(len(row)) - start[row], start=start)
