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
    """Keys and values of one layer as its attention gets them, [num_slots, kv_heads, head_dim].

    They are allocated by the first pass, which shows too whether they are what the layer gives to its cache, or made
    from that (latent attention): then `KVStore.keep` is told of them in each pass.
    """

    is_compileable = False
    is_sliding = False

    def __init__(self, store: KVStore) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._store = store
        self.keys: Tensor = torch.empty(0)
        self.values: Tensor = torch.empty(0)
        self.is_readable_in_place = False  # by compiled CPU code
        self.is_cached = False  # what attention gets is known to be what the cache gives

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
        """Write [1, kv_heads, tokens, head_dim] to the pass's slots; return the whole layer for attention.

        Unless that is known to read just this, they are returned as they are.
        """
        if self.is_cached:
            return self.keep(key_states, value_states)
        self._store.latest = self
        for each in (key_states, value_states):
            vars(each)["rhymerl_store"] = self
        return key_states, value_states

    def keep(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write [1, kv_heads, tokens, head_dim] to the pass's slots; return the whole layer."""
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
        self.write(keys[0].transpose(0, 1), values[0].transpose(0, 1))
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
        self.latest: LayerStore | None = None  # layer whose attention comes next
        super().__init__(layers=list(self.stores))

    def keep(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store what a layer's attention gets for the tokens of a pass; return the whole layer.

        Layers that share keys and values get those of the one whose cache gave them.
        """
        owner: LayerStore | None = vars(keys).get("rhymerl_store")
        if vars(values).get("rhymerl_store") is owner and owner is not None:
            self.latest = owner
            owner.is_cached = True
        layer, self.latest = self.latest, None
        if layer is None:
            raise TypeError("this model's attention computes keys and values that are in no cache")
        return layer.keep(keys, values)

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
            for name in ("is_initialized", "is_readable_in_place", "is_cached"):
                setattr(mine, name, getattr(other, name))
        return store

    @property
    def is_allocated(self) -> bool:
        """Return whether a pass has shown the layers' shapes."""
        return bool(self.stores[0].is_initialized)

    @property
    def is_readable_in_place(self) -> bool:
        """Return whether compiled CPU code can read keys and values; False before the first pass."""
        return all(each.is_readable_in_place for each in self.stores if each.is_initialized) and self.is_allocated
