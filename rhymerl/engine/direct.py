"""The forward pass of Llama-like models, layer by layer over the model's own modules.

transformers calls each layer through wrappers, masks and keyword arguments that take longer than the layer itself when
the model is small. What is computed here is the same; engine/forward.py proves that on the model before this is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules
from transformers import PreTrainedModel

from rhymerl.engine.attention import AttentionPlan, ComparedPlan, TilePlan
from rhymerl.engine.kv_store import KVStore, LayerStore
from rhymerl.engine.layer_steps import Heads, Norm, TorchSteps
from rhymerl.models.attention import LayerAttention
from rhymerl.models.logits import num_tokens

# Their layers are: normalise, attend with rotary embedding, add; normalise, gated MLP, add.
_FAMILIES = {
    f"transformers.models.{name}.modeling_{name}"
    for name in ("llama", "mistral", "ministral", "qwen2", "qwen3", "cwm", "seed_oss")
}
_PLAIN = (nn.Linear, nn.Embedding, nn.ModuleList, nn.SiLU)
_STATIC_ROTARY = (
    "default",
    "linear",
    "llama3",
    "yarn",
)  # the angle of a position does not depend on the other positions
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


def can_be_direct(model: PreTrainedModel, modules: Sequence[nn.Module]) -> bool:
    """Return whether the model is of a known family, and nobody has replaced one of its modules or hooked into it."""
    if type(model).__module__ not in _FAMILIES or not type(model).__name__.endswith("ForCausalLM"):
        return False
    if model.config.rope_parameters["rope_type"] not in _STATIC_ROTARY:
        return False
    if any(getattr(torch_modules, f"_global{name}") for name in _HOOKS):
        return False
    return not any(_is_changed(module, type(model).__module__) for module in modules)


def _is_changed(module: nn.Module, family: str) -> bool:
    kind, state = type(module), module.__dict__
    is_known = kind in _PLAIN or kind.__module__ in (family, "transformers.activations")
    return not is_known or "forward" in state or any(state[name] for name in _HOOKS)


@dataclass(frozen=True, slots=True)
class _Projection:
    """Weight and bias of a linear layer."""

    weight: Tensor
    bias: Tensor | None
    linear: Any

    @classmethod
    def of(cls, linear: Any, rows: int | None = None) -> _Projection:
        bias = None if linear.bias is None else _autocast(linear.bias[:rows])
        return cls(_autocast(linear.weight[:rows]), bias, linear)

    def refresh(self) -> None:
        """Cast the weights of the layer anew, in place."""
        self.weight.copy_(self.linear.weight[: len(self.weight)])
        if self.bias is not None:
            self.bias.copy_(self.linear.bias[: len(self.bias)])

    def __call__(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.weight, self.bias)


def _autocast(weight: Tensor) -> Tensor:
    """Return the weight in autocast's type of number, a copy; without autocast the weight itself."""
    kind = weight.device.type
    return weight.detach().to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else weight


@dataclass(frozen=True, slots=True)
class _Projections:
    """Linear layers with the same input: one matrix product, where autocast copies their weights anyway."""

    parts: Sequence[_Projection]
    weight: Tensor | None  # of all parts, whose own are its rows
    bias: Tensor | None

    @classmethod
    def of(cls, *linears: Any) -> _Projections:
        parts = [_Projection.of(each) for each in linears]
        has_bias = {each.bias is not None for each in parts}
        if len(has_bias) > 1 or any(each.weight.dtype == each.linear.weight.dtype for each in parts):
            return cls(parts, None, None)
        sizes = [len(each.weight) for each in parts]
        weight = torch.cat([each.weight for each in parts])
        bias = torch.cat([each.bias for each in parts if each.bias is not None]) if any(has_bias) else None
        biases = [None] * len(parts) if bias is None else bias.split(sizes)
        rows = zip(weight.split(sizes), biases, linears, strict=True)
        return cls([_Projection(*each) for each in rows], weight, bias)

    def __call__(self, hidden: Tensor) -> Sequence[Tensor]:
        if self.weight is None:
            return [project(hidden) for project in self.parts]
        together = F.linear(hidden, self.weight, self.bias)
        return torch.split(together, [len(each.weight) for each in self.parts], -1)


class _Layer:
    """The parts of a decoder layer that a pass reads; looked up once, since a module finds its parts slowly."""

    def __init__(self, layer: Any, store: LayerStore) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.store = store
        self.dim: int = attention.head_dim
        self.scale: float = attention.scaling
        # Mistral has one for all layers, in its config.
        owner = attention if hasattr(attention, "sliding_window") else attention.config
        self.attention = LayerAttention.of(getattr(owner, "sliding_window", None), None, None)
        self.attention_norm, self.mlp_norm = Norm.of(layer.input_layernorm), Norm.of(layer.post_attention_layernorm)
        self.head_norms = (
            (Norm.of(attention.q_norm), Norm.of(attention.k_norm)) if hasattr(attention, "q_norm") else None
        )
        self.heads = _Projections.of(attention.q_proj, attention.k_proj, attention.v_proj)
        self.gate_and_up = _Projections.of(mlp.gate_proj, mlp.up_proj)
        self.output, self.down = _Projection.of(attention.o_proj), _Projection.of(mlp.down_proj)
        self.projections = (*self.heads.parts, *self.gate_and_up.parts, self.output, self.down)
        self.activation = mlp.act_fn.forward


class DirectForward:
    """Runs a model for which `can_be_direct` holds. Its KV store has been allocated."""

    def __init__(self, model: Any, store: KVStore, steps: TorchSteps) -> None:
        body = model.model
        self._steps = steps
        self._embed, self._rotary, self._norm = body.embed_tokens.forward, body.rotary_emb.forward, Norm.of(body.norm)
        self._layers = [_Layer(*each) for each in zip(body.layers, store.stores, strict=True)]
        self.head = _Projection.of(model.lm_head, num_tokens(model))
        self._projections = [self.head, *(each for layer in self._layers for each in layer.projections)]

    def __call__(
        self, token_ids: Tensor, positions: Tensor, logit_indices: Tensor | None, plan: AttentionPlan | ComparedPlan
    ) -> Tensor:
        """Return logits [M, V] at `logit_indices` [M] (None = all) of the packed tokens [N]."""
        states = self.states(token_ids, positions, plan)
        return self.head(states if logit_indices is None else states[logit_indices])

    def states(self, token_ids: Tensor, positions: Tensor, plan: AttentionPlan | TilePlan | ComparedPlan) -> Tensor:
        """Return what the head makes logits of, [N, H]."""
        hidden, steps = self._embed(token_ids), self._steps
        cos, sin = self._rotary(hidden, positions[None])
        change = torch.zeros_like(hidden, dtype=self.head.weight.dtype)  # of products
        for layer in self._layers:
            normed = steps.add_and_norm(layer.attention_norm, hidden, change)
            query, key, value = (each.view(len(normed), -1, layer.dim) for each in layer.heads(normed))
            heads = Heads(query, key, value, cos[0], sin[0])
            query = steps.turn_and_store(layer.store, layer.head_norms, heads)
            seen = plan.attend(query, layer.store.keys, layer.store.values, layer.scale, layer.attention)
            normed = steps.add_and_norm(layer.mlp_norm, hidden, layer.output(seen.flatten(1)))
            change = layer.down(steps.gated(layer.activation, *layer.gate_and_up(normed)))
        return steps.add_and_norm(self._norm, hidden, change)

    def casts(self) -> list[Tensor]:
        """Return the weights and biases of projections: the model's own, or what autocast has made of them."""
        tensors = (tensor for each in self._projections for tensor in (each.weight, each.bias))
        return [tensor for tensor in tensors if tensor is not None]

    def refresh(self) -> None:
        """Cast weights anew, in place."""
        for each in self._projections:
            each.refresh()
