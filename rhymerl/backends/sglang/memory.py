"""A GPU shared by the trainer and its engine: how much is the engine's, as arithmetic; no device is asked.

What SGLang's mem_fraction_static means is the same from 0.5.17 to 0.5.21 (`KVCacheConfigurator._profile_available_bytes`): the engine
measures what is free before it loads its weights, `pre_model_load_memory`, and its keys and values get what is free after that but for
`pre_model_load_memory * (1 - mem_fraction_static)`. So the fraction is of what was free at its start, not of the GPU; weights, keys and values
are within it, and all else has to be in the rest: its CUDA graphs and activations, and the trainer's update. Only SGLang's default is computed
from the whole GPU. With `enable_memory_saver` weights, keys and values are given back while it sleeps; graphs and activations are not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rhymerl.errors import ConfigError
from rhymerl.models.memory import (
    CONTEXT_BYTES,
    GIB,
    Alternative,
    EngineShape,
    ModelShape,
    UpdateMemory,
    UpdateShape,
    fewest_changes,
    shared_bytes,
    update_memory,
    with_fewer_tokens,
    with_lora,
)

ARGUMENT = "mem_fraction_static"
_FIXED_BYTES = 2 * GIB  # of an engine beyond its static memory: CUDA graphs, workspaces of attention
_SIZE_BYTES = GIB // 4  # of the same, for passes of each further size
_PREFILL_TOKENS = 8192  # SGLang's chunked_prefill_size on GPUs from 60 GB on
_LOGIT_COPIES = 4  # a graph's buffer, float32, log-softmax, noise


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySplit:
    """How the GPU is divided."""

    total_bytes: int
    static_bytes: int  # the engine's weights, keys and values
    fraction: float
    update: UpdateMemory
    release_memory: bool

    def fraction_of(self, free_bytes: int) -> float:
        """Return the mem_fraction_static that gives an engine the same bytes where so many are free."""
        return _fraction(self.static_bytes, free_bytes)

    def __str__(self) -> str:
        turns = ", in turn" if self.release_memory else ""
        return (
            f"memory of {self.total_bytes / GIB:.0f} GiB: update {self.update}, engine {self.static_bytes / GIB:.1f} "
            f"({ARGUMENT} {self.fraction:g}{turns})"
        )


def is_given(arguments: Mapping[str, Any]) -> bool:
    """Return whether the user has divided the GPU: SGLang takes the beginning of a name for the whole."""
    return any(ARGUMENT.startswith(name.replace("-", "_")) for name in arguments)


def engine_shape(model: ModelShape, *, itemsize: int, gpus: int, rows: int, sizes: int = 1) -> EngineShape:
    """Return the sizes of an engine that computes in `itemsize` bytes; weights, keys and values are divided among its `gpus`.

    `rows` are the tokens of a pass of decoding: requests, and draft nodes for each. Passes are of so many `sizes`, by the nodes of a request.
    """
    return EngineShape(
        weights=math.ceil(model.parameters / gpus) * itemsize,
        kv_of_token=2 * model.layers * math.ceil(model.kv_heads / gpus) * model.head_size * itemsize,
        dynamic=_FIXED_BYTES
        + _SIZE_BYTES * (sizes - 1)
        + _PREFILL_TOKENS * (4 * model.hidden + 3 * model.intermediate // gpus) * itemsize
        + _LOGIT_COPIES * rows * model.vocabulary * 4,
        longest_tokens=model.longest_tokens,
        context=CONTEXT_BYTES,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    """Settings that may fit."""

    update: UpdateShape
    engine: EngineShape
    free_bytes: int
    release_memory: bool

    @property
    def static_bytes(self) -> int:
        """What is left for the engine's weights, keys and values while it answers."""
        needs = update_memory(self.update)
        beside = needs.lasting if self.release_memory else needs.total
        return self.free_bytes - self.engine.context - self.engine.dynamic - beside

    @property
    def missing(self) -> int:
        """Bytes that are too few, 0 or less where it fits: for the engine while it answers, and for the update while that sleeps."""
        needed = shared_bytes(update_memory(self.update), self.engine, in_turn=self.release_memory)
        return needed - self.free_bytes


def split(
    update: UpdateShape, engine: EngineShape, *, free_bytes: int, total_bytes: int, release_memory: bool
) -> MemorySplit:
    """Divide what is free, once the trainer holds its weights, between an update and an engine to be started.

    Raises ConfigError where both do not fit, naming settings with which they would.
    """
    case = _Case(update=update, engine=engine, free_bytes=free_bytes, release_memory=release_memory)
    if case.missing > 0:
        raise ConfigError(_refusal(case))
    return MemorySplit(
        total_bytes=total_bytes,
        static_bytes=case.static_bytes,
        fraction=_fraction(case.static_bytes, free_bytes),
        update=update_memory(update),
        release_memory=release_memory,
    )


def _fraction(static_bytes: int, free_bytes: int) -> float:
    """Return it rounded down to three places, and not above what leaves an engine some memory to work with."""
    return min(0.95, math.floor(1000 * static_bytes / (free_bytes - CONTEXT_BYTES)) / 1000)


def _refusal(case: _Case) -> str:
    engine = case.engine
    start = (
        f"backend=sglang: of {case.free_bytes / GIB:.1f} GiB that are free on the GPU the update needs {update_memory(case.update)}, and the engine "
        f"{(CONTEXT_BYTES + engine.dynamic + engine.least) / GIB:.1f} (weights {engine.weights / GIB:.1f}, keys and values of "
        f"{engine.longest_tokens:,} tokens {engine.longest_tokens * engine.kv_of_token / GIB:.1f}, graphs and activations "
        f"{(CONTEXT_BYTES + engine.dynamic) / GIB:.1f}): {case.missing / GIB:.1f} too much"
    )
    own = f"backend.arguments.{ARGUMENT} sets aside this estimate"
    changes = _changes(case)
    alone = [(words, each.missing) for words, each in (change.apply(case) for change in changes) if each.missing <= 0]
    if alone:
        fitting = ", ".join(f"{words} ({-missing / GIB:.1f} to spare)" for words, missing in alone)
        return f"{start}; any of these fits: {fitting}; {own}"
    found = fewest_changes(case, changes, lambda each: each.missing)
    if found is None:
        return f"{start}; no settings fit: take a smaller model or a larger GPU; {own}"
    words, together = found
    return f"{start}; these together fit: {', '.join(words)} ({-together.missing / GIB:.1f} to spare); {own}"


def _changes(case: _Case) -> Sequence[Alternative[_Case]]:
    """Return settings that take less memory than those of the case."""
    update = case.update
    found = [] if update.activation_checkpointing else [Alternative(apply=_checkpoints)]
    if not case.release_memory:
        found.append(Alternative(apply=_takes_turns))
    found.append(Alternative(apply=_in_smaller_parts, is_number=True))
    if not update.offloads_optimizer:
        found.append(Alternative(apply=_offloads))
    if update.weight_itemsize == 4:
        found.append(Alternative(apply=_in_half))
    if not update.has_adapters:
        found.append(Alternative(apply=_with_adapters))
    return found


def _checkpoints(case: _Case) -> tuple[str, _Case]:
    update = replace(case.update, activation_checkpointing=True)
    return "update.activation_checkpointing=true", replace(case, update=update)


def _offloads(case: _Case) -> tuple[str, _Case]:
    return "update.offload_optimizer=true", replace(case, update=replace(case.update, offloads_optimizer=True))


def _takes_turns(case: _Case) -> tuple[str, _Case]:
    return "backend.release_memory=true", replace(case, release_memory=True)


def _with_adapters(case: _Case) -> tuple[str, _Case]:
    return "adapter=lora", replace(case, update=with_lora(case.update))


def _in_half(case: _Case) -> tuple[str, _Case]:
    update = case.update
    half = replace(
        update,
        weight_bytes=update.weight_bytes // 2,
        trained_bytes=update.trained_bytes if update.has_adapters else update.trained_bytes // 2,
        weight_itemsize=2,
        itemsize=2,
    )
    freed = update.weight_bytes - half.weight_bytes
    return "trainer.precision=bf16-true", replace(case, update=half, free_bytes=case.free_bytes + freed)


def _in_smaller_parts(case: _Case) -> tuple[str, _Case]:
    update = with_fewer_tokens(case.update, lambda tried: replace(case, update=tried).missing)
    return f"update.micro_batch_tokens={update.micro_batch_tokens}", replace(case, update=update)
