"""The one KV store: a slot holds one token's keys and values in every layer and is read by its number."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from rhymerl.engine import inputs

if TYPE_CHECKING:
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


class LayerStore(CacheLayerMixin):
    """Keys and values of one layer, [num_slots, kv_heads, head_dim], allocated by the first pass."""

    is_compileable = False
    is_sliding = False

    def __init__(self, store: KVStore) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._store = store
        self.keys: Tensor = torch.empty(0)
        self.values: Tensor = torch.empty(0)
        self.is_readable_in_place = False  # by compiled CPU code

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        # Zeros, not empty: a masked slot has weight 0, and 0 times an uninitialised NaN is NaN.
        slots = self._store.num_slots + 1  # in the last one are keys and values that nobody reads
        self.keys = key_states.new_zeros(slots, key_states.shape[1], key_states.shape[3])
        self.values = value_states.new_zeros(slots, value_states.shape[1], value_states.shape[3])
        self.is_initialized = True
        self.is_readable_in_place = self.keys.shape == self.values.shape and all(
            inputs.on_host(each.device) and each.dtype in (torch.float32, torch.float64)
            for each in (self.keys, self.values)
        )

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write [1, kv_heads, tokens, head_dim] to the pass's slots; return the whole layer for attention."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.write(key_states[0].transpose(0, 1), value_states[0].transpose(0, 1))
        return self.keys, self.values

    def write(self, keys: Tensor, values: Tensor) -> None:
        """Put [tokens, kv_heads, head_dim] into the pass's slots."""
        self.keys.index_copy_(0, self._store.write_slots, keys)
        self.values.index_copy_(0, self._store.write_slots, values)

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return self._store.num_slots

    def get_max_cache_shape(self) -> int:  # its name before transformers 5.20 or so
        return self._store.num_slots

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0


class KVStore(Cache):
    """A transformers Cache over slots. `write_slots` [tokens] says where this pass's tokens go."""

    def __init__(self, num_layers: int, num_slots: int) -> None:
        self.num_slots = num_slots
        self.pool = SlotPool(num_slots)
        self.write_slots: Tensor = torch.empty(0, dtype=torch.int64)
        self.stores = [LayerStore(self) for _ in range(num_layers)]
        super().__init__(layers=list(self.stores))

    def free(self) -> None:
        """Free keys and values at once: stores and layers form reference cycles, which Python frees late."""
        for store in self.stores:
            store.keys = store.values = torch.empty(0)
            store.is_initialized = False

    def smaller(self, num_slots: int) -> KVStore:
        """Return an empty store for the same layers, allocated if this one is."""
        store = KVStore(len(self.stores), num_slots)
        for mine, other in zip(store.stores, self.stores, strict=True):
            mine.keys, mine.values = (
                each.new_zeros(num_slots + 1, *each.shape[1:]) for each in (other.keys, other.values)
            )
            mine.is_initialized, mine.is_readable_in_place = other.is_initialized, other.is_readable_in_place
        return store

    @property
    def is_allocated(self) -> bool:
        """Return whether a pass has shown the layers' shapes."""
        return bool(self.stores[0].is_initialized)

    @property
    def is_readable_in_place(self) -> bool:
        """Return whether compiled CPU code can read keys and values; False before the first pass."""
        return self.stores[0].is_readable_in_place
