"""Passes on a GPU as CUDA graphs: one launch instead of a thousand, each of which takes the host longer than the GPU.

A graph is of a number of tokens and of tiles, to which a pass is padded, and is captured when these numbers come first;
one of few tiles is of short rows or of long ones, whose keys are split.
What a pass needs lies in one buffer at the same places every time. Rows, keys and draft trees are read from there, so
that they need no graphs of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rhymerl.engine.attention import TilePlan
from rhymerl.engine.direct import DirectForward
from rhymerl.engine.inputs import Inputs
from rhymerl.engine.kv_store import KVStore
from rhymerl.engine.layout import PassLayout

_LEAST_BYTES = 2**20  # of the buffer, whose growth drops all graphs
_MOST_TOKENS = 4096  # of a graph; in larger passes the GPU has so much to do that launches do not count


def rounded(num_tokens: int) -> int:
    """Return the tokens of the graph: a power of 2, or one of 3 sizes between two; at most a fifth is padding."""
    step = max(1 << (num_tokens - 1).bit_length() >> 3, 4) if num_tokens > 8 else 1
    return -(-num_tokens // step) * step


class Graphs:
    """Runs passes laid out in tiles over one model and one store, until `forget` says that addresses have changed."""

    def __init__(self, inputs: Inputs) -> None:
        self._inputs, device = inputs, inputs.device
        self._buffer = torch.empty(0, dtype=torch.uint8, device=device)
        self._graphs: dict[tuple[int, int, int, int], _Graph] = {}  # by tokens, tiles, tokens of a tile, and splits
        is_cuda = device.type == "cuda"
        self._place = _Place.on(device) if is_cuda else None
        self._processors = torch.cuda.get_device_properties(device).multi_processor_count if is_cuda else 0

    def forget(self) -> None:
        """Drop the graphs: something is elsewhere now."""
        self._graphs.clear()
        if self._place is not None:  # torch gives memory that no graph uses any more to no other graph
            self._place = _Place.on(self._buffer.device, self._place.stream)

    def logits(
        self, direct: DirectForward, store: KVStore, layout: PassLayout, also: Sequence[npt.NDArray[Any]]
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the logits [M, V] of the pass, and the arrays `also` on the device."""
        assert layout.tiles is not None
        count, tiles, is_small = layout.num_tokens, layout.tiles, layout.num_tokens <= _MOST_TOKENS
        size = rounded(count) if is_small else count
        num_tiles = 1 << (len(tiles.tiles) - 1).bit_length() if is_small else len(tiles.tiles)
        own = [
            _padded(layout.token_ids, size),
            _padded(layout.positions, size),
            _padded(layout.slots, size, store.num_slots),  # a slot that nobody reads
            _padded(tiles.tiles, num_tiles),
            _padded(tiles.ancestors, size),
            tiles.kv_slots,
        ]
        there = self._inputs.put([*own, layout.logit_indices, *also], self._room_for)
        token_ids, positions, store.write_slots, *of_tiles = there[: len(own)]
        splits = tiles.splits(num_tiles * store.stores[0].keys.shape[1], self._processors)
        plan = TilePlan.of(tiles, of_tiles, positions, splits=splits)

        def work() -> Tensor:
            return direct.states(token_ids, positions, plan)

        if is_small:
            key = (size, num_tiles, tiles.most, splits)
            if key not in self._graphs:
                self._graphs[key] = _Graph(work, self._place)
            states = self._graphs[key].replay(work)[:count]
        else:
            states = work()
        indices = there[len(own)]
        return direct.head(states if len(indices) == count else states[indices]), there[len(own) + 1 :]

    def _room_for(self, size: int) -> Tensor:
        """Return the buffer, which is replaced where it is too small."""
        if size > len(self._buffer):
            self.forget()
            self._buffer = torch.empty(max(2 * size, _LEAST_BYTES), dtype=torch.uint8, device=self._buffer.device)
        return self._buffer


@dataclass(frozen=True, slots=True)
class _Place:
    """Where graphs are captured: a stream and memory that all of them share."""

    stream: torch.cuda.Stream
    pool: Any

    @classmethod
    def on(cls, device: torch.device, stream: torch.cuda.Stream | None = None) -> _Place:
        return cls(stream or torch.cuda.Stream(device), torch.cuda.graph_pool_handle())


class _Graph:
    """A captured piece of work, and its result; without a place the work itself."""

    def __init__(self, work: Callable[[], Tensor], place: _Place | None) -> None:
        self._graph = torch.cuda.CUDAGraph() if place is not None else None
        if place is None or self._graph is None:
            self._result = work()
            return
        place.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(place.stream):
            work()  # compiles kernels, which a capture cannot
            self._graph.capture_begin(pool=place.pool, capture_error_mode="thread_local")  # others may be at work
            self._result = work()
            self._graph.capture_end()
        torch.cuda.current_stream().wait_stream(place.stream)

    def replay(self, work: Callable[[], Tensor]) -> Tensor:
        """Return the result, which the next replay overwrites."""
        if self._graph is None:
            return self._result.copy_(work())
        self._graph.replay()
        return self._result


def _padded(array: npt.NDArray[Any], size: int, value: int = 0) -> npt.NDArray[Any]:
    out = np.full((size, *array.shape[1:]), value, array.dtype)
    out[: len(array)] = array
    return out
