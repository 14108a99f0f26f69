"""Setups of models of which only sizes are known."""

from __future__ import annotations

from typing import Any

from rhymerl.memory.base import Layout, Setup
from rhymerl.memory.fitting import changes
from rhymerl.memory.outline import ModelShape, Outline, Weight


def setup_of_sizes(
    *,
    layers: int,
    hidden: int,
    intermediate: int,
    vocabulary: int,
    parameters: int,
    heads: int = 1,
    itemsize: int = 4,
    compute_itemsize: int = 4,
    longest: int = 1536,
    adapters: int = 0,
    **more: Any,
) -> Setup:
    """One tensor has all weights, and another one those of adapters, if there are any."""
    weights = Weight(shape=(parameters,), itemsize=itemsize, is_trained=not adapters)
    beside = (Weight(shape=(adapters,), itemsize=4, is_full=True),) if adapters else ()
    model = ModelShape(
        parameters=parameters,
        layers=layers,
        layers_with_keys=layers,
        recurrent_layers=0,
        recurrent_bytes=0,
        mlps=layers,
        state_bytes=0,
        hidden=hidden,
        intermediate=intermediate,
        vocabulary=vocabulary,
        heads=heads,
        kv_heads=heads,
        head_size=hidden // heads,
        itemsize=itemsize,
        compute_itemsize=compute_itemsize,
        longest_tokens=longest,
    )
    settings: dict[str, Any] = {
        "layout": Layout(),
        "is_mixed": compute_itemsize < itemsize,
        "is_eager": False,
        "states": 2,
        "epochs": 1,
        "mini_batches": 1,
        "micro_batch_tokens": 16_384,
        "step_tokens": 10**6,
        "chunk_tokens": 1000,
        "activation_checkpointing": False,
    }
    return Setup(tensors=Outline(policy=(weights, *beside)), model=model, **{**settings, **more})


def with_lora(setup: Setup) -> Setup:
    """The setup with adapter=lora."""
    (found,) = next(each for each in changes(setup) if each.words == "adapter=lora").apply(setup)
    return found
