"""A GPU shared by the trainer and its engine: how much is the engine's, as arithmetic; no device is asked.

What SGLang's mem_fraction_static means is the same from 0.5.17 to 0.5.21
(`KVCacheConfigurator._profile_available_bytes`): the engine measures what is free before it loads its weights,
`pre_model_load_memory`, and its keys and values get what is free after that but for `pre_model_load_memory * (1 -
mem_fraction_static)`. So the fraction is of what was free at its start, not of the GPU; weights, keys and values are
within it, and all else has to be in the rest: its CUDA graphs and activations, and the trainer's update. Only SGLang's
default is computed from the whole GPU. With `enable_memory_saver` weights, keys and values are given back while it
sleeps; graphs and activations are not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rhymerl.errors import ConfigError
from rhymerl.memory.base import CONTEXT_BYTES, GIB, EngineShape, Setup
from rhymerl.memory.fitting import changes, fewest_changes
from rhymerl.memory.outline import ModelShape
from rhymerl.memory.parts import RankMemory, rank_memory

ARGUMENT = "mem_fraction_static"
_FIXED_BYTES = 2 * GIB  # of an engine beyond its static memory: CUDA graphs, workspaces of attention
_SIZE_BYTES = GIB // 4  # of the same, for passes of each further size
_PREFILL_TOKENS = 8192  # SGLang's chunked_prefill_size on GPUs from 60 GB on
_LOGIT_COPIES = 4  # a graph's buffer, float32, log-softmax, noise


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySplit:
    """How the GPU is divided."""

    total_bytes: int
    free_bytes: int  # once the trainer holds its weights
    memory: RankMemory  # of the trainer's rank, with the engine at its least

    @property
    def static_bytes(self) -> int:
        """Return the bytes of the engine's weights, keys and values."""
        return self.free_bytes - self.memory.parts["engine_rest"] - self.memory.beside_engine

    def fraction_of(self, free_bytes: int) -> float:
        """Return the mem_fraction_static that gives an engine the same bytes when `free_bytes` are free.

        It is rounded down to three places, and leaves an engine some memory to work with.
        """
        return min(0.95, math.floor(1000 * self.static_bytes / (free_bytes - CONTEXT_BYTES)) / 1000)

    def __str__(self) -> str:
        turns = ", in turn" if self.memory.in_turn else ""
        return (
            f"memory of {self.total_bytes / GIB:.0f} GiB: update {self.memory.update_words()}, engine {self.static_bytes / GIB:.1f} "
            f"({ARGUMENT} {self.fraction_of(self.free_bytes):g}{turns})"
        )


def is_given(arguments: Mapping[str, Any]) -> bool:
    """Return whether the user has divided the GPU: SGLang takes the beginning of a name for the whole."""
    return any(ARGUMENT.startswith(name.replace("-", "_")) for name in arguments)


def engine_shape(model: ModelShape, *, itemsize: int, gpus: int, rows: int, sizes: int = 1) -> EngineShape:
    """Return the sizes of an engine that computes in `itemsize` bytes.

    Weights, keys and values are divided among its `gpus`. `rows` are the tokens of a pass of decoding: requests, and
    draft nodes for each. Passes are of so many `sizes`, by the nodes of a request.
    """
    return EngineShape(
        weights=math.ceil(model.parameters / gpus) * itemsize,
        kv_of_token=2 * model.layers_with_keys * math.ceil(model.kv_heads / gpus) * model.head_size * itemsize,
        dynamic=_FIXED_BYTES
        + _SIZE_BYTES * (sizes - 1)
        + _PREFILL_TOKENS * (4 * model.hidden + 3 * model.intermediate // gpus) * itemsize
        + _LOGIT_COPIES * rows * model.vocabulary * 4,
        longest_tokens=model.longest_tokens,
        context=CONTEXT_BYTES,
    )


def split(setup: Setup, *, free_bytes: int, total_bytes: int) -> MemorySplit:
    """Divide free memory between the trainer's update and the engine that the setup is about to start.

    The trainer already holds its weights. Raises ConfigError where both do not fit, naming settings with which they
    would.
    """
    memory = rank_memory(setup)
    device_bytes = free_bytes + memory.models + memory.parts["context"]  # as if these were all that is not free
    if memory.total > device_bytes:
        raise ConfigError(_refusal(setup, memory, free_bytes=free_bytes, device_bytes=device_bytes))
    return MemorySplit(total_bytes=total_bytes, free_bytes=free_bytes, memory=memory)


def _refusal(setup: Setup, memory: RankMemory, *, free_bytes: int, device_bytes: int) -> str:
    assert setup.engine is not None
    weights, keys, rest = setup.engine.parts.values()
    start = (
        f"backend=sglang: of {free_bytes / GIB:.1f} GiB that are free on the GPU the update needs {memory.update_words()}, and the engine "
        f"{(weights + keys + rest) / GIB:.1f} (weights {weights / GIB:.1f}, keys and values of "
        f"{setup.engine.longest_tokens:,} tokens {keys / GIB:.1f}, graphs and activations "
        f"{rest / GIB:.1f}): {(memory.total - device_bytes) / GIB:.1f} too much"
    )
    own = f"backend.arguments.{ARGUMENT} sets aside this estimate"
    known = list(changes(setup, with_ranks=False))
    alone = [found for each in known if (found := fewest_changes(setup, [each], device_bytes)) is not None]
    if alone:
        return f"{start}; any of these fits: {', '.join(_spare(*found) for found in alone)}; {own}"
    together = fewest_changes(setup, known, device_bytes)
    if together is None:
        return f"{start}; no settings fit: take a smaller model or a larger GPU; {own}"
    return f"{start}; these together fit: {_spare(*together)}; {own}"


def _spare(words: Sequence[str], num_bytes: int) -> str:
    return f"{', '.join(words)} ({num_bytes / GIB:.1f} to spare)"
