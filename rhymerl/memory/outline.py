"""The tensors of models without their content, and what of each a rank holds: arithmetic on shapes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from rhymerl.models.critic import Critic
from rhymerl.models.decoder import decoder_of
from rhymerl.models.lora import adapter_parameters
from rhymerl.models.recurrent import WITHOUT_KEYS, kept_bytes, recurrent_modules, state_bytes
from rhymerl.models.sharding import gathered_together

_DTYPES = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}  # by bytes
_FULL = 4  # bytes that adapters and value heads keep at least, whatever the rest is cast to


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """A parameter without its content."""

    shape: tuple[int, ...]
    itemsize: int
    is_trained: bool = True
    is_full: bool = False  # keeps float32 at least
    is_whole: bool = False  # on every rank, however the others are sharded
    group: int = 0  # those of one group are gathered together

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    def part(self, num_shards: int) -> int:
        """Return the elements on the fullest rank: `fully_shard` divides each tensor along its first dimension."""
        if self.is_whole or not self.shape:
            return self.count
        return math.ceil(self.shape[0] / num_shards) * math.prod(self.shape[1:])

    def cast(self, itemsize: int) -> Weight:
        """Return the weight in a Trainer's precision of so many bytes."""
        return replace(self, itemsize=max(itemsize, _FULL) if self.is_full else itemsize)


OutlineWeights = tuple[Weight, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """The tensors of all models that a rank holds for its update."""

    policy: OutlineWeights
    reference: OutlineWeights = ()  # empty where it is the policy without adapters
    critic: OutlineWeights = ()

    @property
    def updated(self) -> OutlineWeights:
        """Return the tensors of the trained models, frozen ones among them."""
        return (*self.policy, *self.critic)

    @property
    def trained(self) -> OutlineWeights:
        """Return the tensors that have gradients and moments."""
        return tuple(each for each in self.updated if each.is_trained)

    def cast(self, itemsize: int) -> Outline:
        """Return the weights in a Trainer's precision of so many bytes."""
        policy, reference, critic = (
            tuple(each.cast(itemsize) for each in weights) for weights in (self.policy, self.reference, self.critic)
        )
        return Outline(policy=policy, reference=reference, critic=critic)


def outline(model: PreTrainedModel, *, reference: PreTrainedModel | None, critic: Critic | None) -> Outline:
    """Return the tensors of models, which may be on the meta device; the reference may be the model itself."""
    own: OutlineWeights = ()
    if critic is not None:
        head = (_weight(each, is_full=True, is_whole=True) for each in critic.head.parameters())
        own = (*_weights(critic.body), *head)
    return Outline(policy=_weights(model), reference=_weights(None if reference is model else reference), critic=own)


def _weights(model: PreTrainedModel | None) -> OutlineWeights:
    if model is None:
        return ()
    groups: dict[int, int] = {}
    for number, group in enumerate(gathered_together(model)):
        for parameter in group.parameters():
            groups.setdefault(id(parameter), number)
    full = set(map(id, adapter_parameters(model)))
    return tuple(_weight(each, is_full=id(each) in full, group=groups[id(each)]) for each in model.parameters())


def _weight(parameter: nn.Parameter, **more: Any) -> Weight:
    return Weight(shape=tuple(parameter.shape), itemsize=parameter.itemsize, is_trained=parameter.requires_grad, **more)


def total_bytes(weights: Iterable[Weight], num_shards: int = 1) -> int:
    """Return the bytes of the tensors on the rank that has the most of them."""
    return sum(each.part(num_shards) * each.itemsize for each in weights)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The sizes of a policy, a decoder with gated MLPs (Llama-like)."""

    parameters: int  # without adapters
    layers: int
    layers_with_keys: int
    recurrent_layers: int
    recurrent_bytes: int  # that one of these keeps of a token for a backward
    mlps: int
    state_bytes: int  # that an engine keeps of a request in layers without keys
    hidden: int
    intermediate: int
    vocabulary: int
    heads: int
    kv_heads: int
    head_size: int
    itemsize: int  # of its weights
    compute_itemsize: int  # of what layers compute
    longest_tokens: int

    @property
    def attention(self) -> int:
        return self.heads * self.head_size


def model_shape(
    model: PreTrainedModel, longest_tokens: int, *, itemsize: int | None = None, compute_itemsize: int | None = None
) -> ModelShape:
    """Return what an engine is made for; weights and layers have the model's own dtype where nothing else is said."""
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    own = set(map(id, adapter_parameters(model)))
    size = itemsize or model.dtype.itemsize
    kinds = getattr(config, "layer_types", None) or ()
    without = sum(kind in WITHOUT_KEYS for kind in kinds)
    recurrent = recurrent_modules(decoder_of(model))
    computed = _DTYPES[compute_itemsize or size]
    return ModelShape(
        parameters=sum(each.numel() for each in model.parameters() if id(each) not in own),
        layers=config.num_hidden_layers,
        layers_with_keys=config.num_hidden_layers - without,
        recurrent_layers=len(recurrent),
        recurrent_bytes=kept_bytes(recurrent[0], config.hidden_size, computed) if recurrent else 0,
        mlps=sum(kind in ("mlp", "moe") for kind in kinds) or config.num_hidden_layers,
        state_bytes=state_bytes(model, compute_itemsize or size),
        hidden=config.hidden_size,
        intermediate=int(np.max(getattr(config, "intermediate_size", None) or 4 * config.hidden_size)),
        vocabulary=config.vocab_size,
        heads=heads,
        kv_heads=_largest(config, "num_key_value_heads") or heads,
        head_size=_largest(config, "head_dim") or config.hidden_size // heads,
        itemsize=size,
        compute_itemsize=compute_itemsize or size,
        longest_tokens=longest_tokens,
    )


def _largest(config: Any, name: str) -> int:
    """Return a size that may be another one in each layer (Gemma 4): the largest; 0 where the config has none."""
    layers = getattr(config, "per_layer_config", None)
    return max(getattr(each, name, None) or 0 for each in (layers if layers is not None else [config]))
