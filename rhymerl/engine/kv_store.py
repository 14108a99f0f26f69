"""The one KV store: a slot holds one token's keys and values in every layer and is read by its number."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from rhymerl.engine import inputs
from rhymerl.engine.recurrent import RowStates
from rhymerl.engine.rows import SlotPool


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

    @property
    def write_slots(self) -> Tensor:
        """Return the pass's slots [tokens]."""
        return self._store.write_slots

    def write(self, keys: Tensor, values: Tensor) -> None:
        """Put [tokens, kv_heads, head_dim] into the pass's slots."""
        self.keys.index_copy_(0, self.write_slots, keys)
        self.values.index_copy_(0, self.write_slots, values)

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return self._store.num_slots

    def get_max_cache_shape(self) -> int:  # its name before transformers 5.20 or so
        return self._store.num_slots

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0


class KVStore(Cache):
    """A transformers Cache over slots. `write_slots` [tokens] says where this pass's tokens go.

    What layers keep by row instead of by token is in `states`, of at most `num_rows` rows.
    """

    def __init__(self, num_layers: int, num_slots: int, num_rows: int = 1) -> None:
        self.num_slots = num_slots
        self._num_rows = num_rows
        self.states = RowStates(num_rows)
        self.pool = SlotPool(num_slots)
        self.write_slots: Tensor = torch.empty(0, dtype=torch.int64)
        self.stores = [LayerStore(self) for _ in range(num_layers)]
        self.latest: LayerStore | None = None  # layer whose attention comes next
        self._windows = set[int | None]()  # of all layers with attention, since the first pass
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

    def note(self, window: int | None) -> None:
        """A layer's attention has this window."""
        self._windows.add(None if window is None else abs(window))

    def free(self) -> None:
        """Free keys and values at once: stores and layers form reference cycles, which Python frees late."""
        for store in self.stores:
            store.keys = store.values = torch.empty(0)
            store.is_initialized = False
        self.states = RowStates(self._num_rows)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """Return None, so that the layer hands over the inputs of the whole pass."""

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any) -> Tensor:
        """Return what the convolution of each token takes."""
        return self.states.windows((layer_idx, state_idx), conv_states, kwargs["conv_kernel_size"])

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """Return None, so that the layer takes all tokens at once; its rule finds the states itself."""
        self.states.enter((layer_idx, state_idx))

    def update_recurrent_state(self, recurrent_states: Tensor, *args: object, **kwargs: object) -> Tensor:
        """Change nothing: the rule has advanced the states."""
        return recurrent_states

    def smaller(self, num_slots: int) -> KVStore:
        """Return an empty store of 2 rows for the same layers, allocated if this one is."""
        store = KVStore(len(self.stores), num_slots, 2)
        for mine, other in zip(store.stores, self.stores, strict=True):
            mine.keys, mine.values = (
                each.new_zeros(num_slots + 1, *each.shape[1:]) for each in (other.keys, other.values)
            )
            for name in ("is_initialized", "is_readable_in_place", "is_cached"):
                setattr(mine, name, getattr(other, name))
        return store

    @property
    def reach(self) -> int | None:
        """Return how many positions, up to its own, a token sees at most; None: all of them, in some layer."""
        windows = [each for each in self._windows if each is not None]
        return max(windows) if windows and len(windows) == len(self._windows) else None

    @property
    def is_allocated(self) -> bool:
        """Return whether a pass has shown the layers' shapes."""
        return any(each.is_initialized for each in self.stores)

    @property
    def is_readable_in_place(self) -> bool:
        """Return whether compiled CPU code can read keys and values; False before the first pass."""
        return all(each.is_readable_in_place for each in self.stores if each.is_initialized) and self.is_allocated
