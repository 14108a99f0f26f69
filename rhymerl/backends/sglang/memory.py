"""A GPU shared by the trainer and its engine: how much is the engine's, as arithmetic; no device is asked.

What SGLang's mem_fraction_static means is the same from 0.5.17 to 0.5.21 (`KVCacheConfigurator._profile_available_bytes`): the engine
measures what is free before it loads its weights, `pre_model_load_memory`, and its keys and values get what is free after that but for
`pre_model_load_memory * (1 - mem_fraction_static)`. So the fraction is of what was free at its start, not of the GPU; weights, keys and values
are within it, and all else has to be in the rest: its CUDA graphs and activations, and the trainer's update. Only SGLang's default is computed
from the whole GPU. With `enable_memory_saver` weights, keys and values are given back while it sleeps; graphs and activations are not.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rhymerl.backends.sglang.nodes import num_sizes
from rhymerl.errors import ConfigError
from rhymerl.models.memory import GIB, UpdateMemory, UpdateShape, update_memory

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from rhymerl.backends.sglang.session_settings import SessionSettings

ARGUMENT = "mem_fraction_static"
_CONTEXT_BYTES = GIB  # of an engine before it measures: CUDA's context and the libraries
_FIXED_BYTES = 2 * GIB  # of an engine beyond its static memory: CUDA graphs, workspaces of attention
_SIZE_BYTES = GIB // 4  # of the same, for passes of each further size
_PREFILL_TOKENS = 8192  # SGLang's chunked_prefill_size on GPUs from 60 GB on
_LOGIT_COPIES = 4  # a graph's buffer, float32, log-softmax, noise
_STEP_TOKENS = 1024  # between numbers of micro_batch_tokens that are tried
_LORA_RANK = 16  # the default of adapter=lora
_ITEMSIZES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineShape:
    """What an engine takes of each of its GPUs, in bytes."""

    weights: int
    kv_of_token: int
    dynamic: int  # graphs and activations
    longest_tokens: int

    @property
    def least(self) -> int:
        """The static memory without which the longest sequence has no room."""
        return self.weights + self.longest_tokens * self.kv_of_token


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
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


def engine_shape(settings: SessionSettings, model: PreTrainedModel, *, dtype: str) -> EngineShape:
    """Return the sizes of an engine of the model in that dtype; weights, keys and values are divided among its GPUs."""
    update = settings.update
    assert update is not None, "only then is anything divided"
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
    itemsize, gpus = _ITEMSIZES[dtype], settings.tensor_parallel
    own = sum(each.numel() for name, each in model.named_parameters() if ".lora_" not in name)
    rows = settings.max_running * settings.n
    return EngineShape(
        weights=math.ceil(own / gpus) * itemsize,
        kv_of_token=2 * update.layers * math.ceil(kv_heads / gpus) * head_size * itemsize,
        dynamic=_FIXED_BYTES
        + _SIZE_BYTES * (num_sizes(settings.n, settings.budget) - 1)
        + _PREFILL_TOKENS * (4 * update.hidden + 3 * update.intermediate // gpus) * itemsize
        + _LOGIT_COPIES * rows * update.vocabulary * 4,
        longest_tokens=settings.longest_tokens or update.longest_tokens,
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
        """What is left for the engine's weights, keys and values while it answers.

        If it gives them back for an update, only what an update leaves behind stands beside them.
        """
        needs = update_memory(self.update)
        beside = needs.lasting if self.release_memory else needs.total
        return self.free_bytes - _CONTEXT_BYTES - self.engine.dynamic - beside

    @property
    def missing(self) -> int:
        """Bytes that are too few, 0 or less where it fits: for the engine while it answers, and for the update while that sleeps."""
        too_few = self.engine.least - self.static_bytes
        if not self.release_memory:
            return too_few
        awake = self.free_bytes - _CONTEXT_BYTES - self.engine.dynamic
        return max(too_few, update_memory(self.update).total - awake)


def split(
    update: UpdateShape, engine: EngineShape, *, free_bytes: int, total_bytes: int, release_memory: bool
) -> Split:
    """Divide what is free, once the trainer holds its weights, between an update and an engine to be started.

    Raises ConfigError where both do not fit, naming settings with which they would.
    """
    case = _Case(update=update, engine=engine, free_bytes=free_bytes, release_memory=release_memory)
    if case.missing > 0:
        raise ConfigError(_refusal(case))
    return Split(
        total_bytes=total_bytes,
        static_bytes=case.static_bytes,
        fraction=_fraction(case.static_bytes, free_bytes),
        update=update_memory(update),
        release_memory=release_memory,
    )


def _fraction(static_bytes: int, free_bytes: int) -> float:
    """Return it rounded down to three places, and not above what leaves an engine some memory to work with."""
    return min(0.95, math.floor(1000 * static_bytes / (free_bytes - _CONTEXT_BYTES)) / 1000)


def _refusal(case: _Case) -> str:
    engine = case.engine
    start = (
        f"backend=sglang: of {case.free_bytes / GIB:.1f} GiB that are free on the GPU the update needs {update_memory(case.update)}, and the engine "
        f"{(_CONTEXT_BYTES + engine.dynamic + engine.least) / GIB:.1f} (weights {engine.weights / GIB:.1f}, keys and values of "
        f"{engine.longest_tokens:,} tokens {engine.longest_tokens * engine.kv_of_token / GIB:.1f}, graphs and activations "
        f"{(_CONTEXT_BYTES + engine.dynamic) / GIB:.1f}): {case.missing / GIB:.1f} too much"
    )
    own = f"backend.arguments.{ARGUMENT} sets aside this estimate"
    alone = [f"{words} ({-each.missing / GIB:.1f} to spare)" for words, each in _changes(case) if each.missing <= 0]
    if alone:
        return f"{start}; any of these fits: {', '.join(alone)}; {own}"
    words, together = [], case
    while together.missing > 0:
        following = next(((name, each) for name, each in _changes(together) if each.missing < together.missing), None)
        if following is None:
            return f"{start}; no settings fit: take a smaller model or a larger GPU; {own}"
        words.append(following[0])
        together = following[1]
    return f"{start}; these together fit: {', '.join(words)} ({-together.missing / GIB:.1f} to spare); {own}"


def _changes(case: _Case) -> Iterator[tuple[str, _Case]]:
    """Yield settings that take less memory than those of the case, and what becomes of it."""
    update = case.update
    if not update.activation_checkpointing:
        checkpointed = replace(update, activation_checkpointing=True)
        yield "update.activation_checkpointing=true", replace(case, update=checkpointed)
    if not case.release_memory:
        yield "backend.release_memory=true", replace(case, release_memory=True)
    fewer = range(update.tokens - _STEP_TOKENS, max(update.longest_tokens, _STEP_TOKENS) - 1, -_STEP_TOKENS)
    smaller = [replace(case, update=replace(update, micro_batch_tokens=tokens)) for tokens in fewer]
    if smaller:
        found = next((each for each in smaller if each.missing <= 0), smaller[-1])
        yield f"update.micro_batch_tokens={found.update.micro_batch_tokens}", found
    if update.weight_itemsize == 4:
        half = replace(
            update,
            weight_bytes=update.weight_bytes // 2,
            trained_bytes=update.trained_bytes if update.has_adapters else update.trained_bytes // 2,
            weight_itemsize=2,
            itemsize=2,
        )
        freed = update.weight_bytes - half.weight_bytes
        yield "trainer.precision=bf16-true", replace(case, update=half, free_bytes=case.free_bytes + freed)
    if not update.has_adapters:
        yield "adapter=lora", replace(case, update=with_lora(update))


def with_lora(update: UpdateShape) -> UpdateShape:
    """Return the shape with adapters in float32 on all linear layers of the decoder instead of what is trained."""
    h, a, i = update.hidden, update.attention, update.intermediate
    adapters = _LORA_RANK * update.layers * (4 * (h + a) + 3 * (h + i))
    return replace(update, trained_bytes=4 * adapters, has_adapters=True)
