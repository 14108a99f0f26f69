"""The slots of the KV store that are free."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from rhymerl.types import IndexArray


class SlotPool:
    """Numbers of free slots. Which slot a token gets is of no consequence for any value."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = np.arange(num_slots, dtype=np.int64)[::-1].copy()
        self._num_free = num_slots

    @property
    def num_free(self) -> int:
        return self._num_free

    def take(self, count: int) -> IndexArray:
        """Return `count` slots; the caller has checked `num_free`."""
        assert count <= self._num_free, f"took {count} of {self._num_free} free slots"
        self._num_free -= count
        return self._free[self._num_free : self._num_free + count].copy()

    def give(self, slots: IndexArray) -> None:
        """Slots that nobody reads any more."""
        self._free[self._num_free : self._num_free + len(slots)] = slots
        self._num_free += len(slots)

    def check_integrity(self, held: Iterable[IndexArray]) -> None:
        """Raise AssertionError unless every slot is free or held exactly once."""
        everything = np.concatenate([self._free[: self._num_free], *held])
        missing = self.num_slots - len(np.unique(everything))
        assert len(everything) == self.num_slots and missing == 0, (
            f"KV slots: {len(everything)} accounted for, {self.num_slots} exist, {missing} missing"
        )
