"""What a Llama-like layer does between its matrix products: in torch, in compiled loops on a CPU, by kernels on a GPU.

Llama normalises by root mean squares (arXiv 1910.07467), turns queries and keys by their positions (arXiv 2104.09864)
and gates its MLP by SiLU (arXiv 2002.05202).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.activations import SiLUActivation

from rhymerl.engine.attention import difference_of
from rhymerl.engine.fused import add_rms_norm, rms_norm, rotate_and_store
from rhymerl.engine.kv_store import LayerStore


@dataclass(frozen=True, slots=True)
class Norm:
    """An RMS norm, and what its formula needs."""

    forward: Callable[[Tensor], Tensor]
    weight: Tensor
    epsilon: float

    @classmethod
    def of(cls, norm: Any) -> Norm:
        return cls(norm.forward, norm.weight.detach(), norm.variance_epsilon)


HeadNorms = tuple[Norm, Norm]  # of the heads of queries, and of keys


class Heads(NamedTuple):
    """The heads of a pass's N tokens, and the angles by which queries and keys are turned."""

    query: Tensor  # [N, heads, dim]
    key: Tensor  # [N, kv_heads, dim]
    value: Tensor
    cos: Tensor  # [N, dim]
    sin: Tensor


class TorchSteps:
    """The steps in torch, on any device."""

    def add_and_norm(self, norm: Norm, hidden: Tensor, change: Tensor) -> Tensor:
        """Add the change to `hidden` [N, H] in place; return the norm of that."""
        return norm.forward(hidden.add_(change))

    def turn_and_store(self, store: LayerStore, norms: HeadNorms | None, heads: Heads) -> Tensor:
        """Store keys turned by their positions, and values; return the turned query, [N, heads, dim]."""
        query, key, value, cos, sin = heads
        if norms is not None:
            query, key = norms[0].forward(query), norms[1].forward(key)
        cos, sin = cos[:, None], sin[:, None]
        store.write(_turned(key, cos, sin), value)
        return _turned(query, cos, sin)

    def gated(self, activation: Callable[[Tensor], Tensor], gate: Tensor, up: Tensor) -> Tensor:
        """Return activation(gate) * up."""
        return activation(gate) * up


class CompiledSteps(TorchSteps):
    """The steps of a float32 model on a CPU, in compiled loops."""

    def add_and_norm(self, norm: Norm, hidden: Tensor, change: Tensor) -> Tensor:
        out = torch.empty_like(hidden)
        add_rms_norm(hidden.numpy(), change.numpy(), norm.weight.numpy(), norm.epsilon, out.numpy())
        return out

    def turn_and_store(self, store: LayerStore, norms: HeadNorms | None, heads: Heads) -> Tensor:
        if norms is not None:
            for each, norm in zip((heads.query, heads.key), norms, strict=True):
                rms_norm(each.numpy(), norm.weight.numpy(), norm.epsilon)
        arrays = (*heads, store.write_slots, store.keys, store.values)
        rotate_and_store(*(each.numpy() for each in arrays))
        return heads.query


class TritonSteps(TorchSteps):
    """The steps on a GPU, each by one kernel; results are rounded once, to the products' dtype or that of keys."""

    def add_and_norm(self, norm: Norm, hidden: Tensor, change: Tensor) -> Tensor:
        from rhymerl.engine import triton_layers

        return triton_layers.add_rms_norm(hidden, change, norm.weight, norm.epsilon)

    def turn_and_store(self, store: LayerStore, norms: HeadNorms | None, heads: Heads) -> Tensor:
        from rhymerl.engine import triton_layers

        weights = (norms[0].weight, norms[1].weight, norms[0].epsilon) if norms is not None else None
        return triton_layers.turn_and_store(*heads, store.write_slots, store.keys, store.values, weights)

    def gated(self, activation: Callable[[Tensor], Tensor], gate: Tensor, up: Tensor) -> Tensor:
        from rhymerl.engine import triton_layers

        is_silu = isinstance(getattr(activation, "__self__", None), torch.nn.SiLU | SiLUActivation)
        return triton_layers.silu_times(gate, up) if is_silu else super().gated(activation, gate, up)


class ComparedSteps(TorchSteps):
    """The steps in torch, beside which those of kernels are taken from the same numbers."""

    def __init__(self) -> None:
        self._kernels = TritonSteps()
        self.difference = 0.0  # the largest so far, as a share of the largest number of its step

    def add_and_norm(self, norm: Norm, hidden: Tensor, change: Tensor) -> Tensor:
        sums = hidden.clone()
        found = self._kernels.add_and_norm(norm, sums, change)
        expected = super().add_and_norm(norm, hidden, change)
        self._compare((found, sums), (expected, hidden))
        return expected

    def turn_and_store(self, store: LayerStore, norms: HeadNorms | None, heads: Heads) -> Tensor:
        found, expected = (
            (steps(store, norms, heads), store.keys[store.write_slots], store.values[store.write_slots])
            for steps in (self._kernels.turn_and_store, super().turn_and_store)
        )
        self._compare(found, expected)
        return expected[0]

    def gated(self, activation: Callable[[Tensor], Tensor], gate: Tensor, up: Tensor) -> Tensor:
        expected = super().gated(activation, gate, up)
        self._compare((self._kernels.gated(activation, gate, up),), (expected,))
        return expected

    def _compare(self, found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
        differences = map(difference_of, found, expected)
        self.difference = max(self.difference, *differences)


def _turned(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding in halves (arXiv 2104.09864, as in Llama): heads [N, heads, dim], angles [N, 1, dim]."""
    half = heads.shape[-1] // 2
    return heads * cos + torch.cat((-heads[..., half:], heads[..., :half]), -1) * sin
