"""Numbers that an engine's process counts and the trainer reads, in a small shared file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

NAMES = ("asks", "hits", "drafted_nodes", "bad_drafts", "draft_s", "passes", "row_passes", "nodes")


class Counters:
    """Counters in a file that two processes share: one calls `add`, the other `since`."""

    def __init__(self, path: Path, *, new: bool = False) -> None:
        if new:
            np.zeros(len(NAMES)).tofile(path)
        self._values: npt.NDArray[np.float64] = np.memmap(path, np.float64, "r+", shape=(len(NAMES),))
        self._begun = self._reported = np.array(self._values)

    def begin(self) -> None:
        """Count from now on, as if nothing had been before."""
        self.since()
        self._begun = self._reported

    def add(self, **amounts: float) -> None:
        """Add amounts to the counts."""
        for name, amount in amounts.items():
            self._values[NAMES.index(name)] += amount

    def totals(self) -> Mapping[str, float]:
        """Return the counts."""
        return dict(zip(NAMES, self._values.tolist(), strict=True))

    @property
    def nodes_a_pass(self) -> float | None:
        """Draft nodes of a request in a pass, on average; None before the first pass."""
        new = self._values - self._begun
        row_passes, nodes = (float(new[NAMES.index(name)]) for name in ("row_passes", "nodes"))
        return nodes / row_passes if row_passes else None

    def since(self) -> Mapping[str, float]:
        """Return the counts since the last call."""
        now = np.array(self._values)
        new, self._reported = now - self._reported, now
        return dict(zip(NAMES, new.tolist(), strict=True))
