"""What a layer needs of attention beside the causal mask: a window or chunks, scores that are soft-capped, sinks.

Each layer says what it needs when it calls transformers' attention interface; of chunks, and of the windows of some
models (Qwen2-MoE, Phi-MoE), only its config knows.
Proofs compare that with the model's own forward.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

# Settings that show in long sequences alone, and what they are in proofs, whose sequences are short.
_LONG = ("sliding_window", "attention_chunk_size", "floor_scale")
_SHORT = 3  # positions


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerAttention:
    """What the attention of a layer is beside causal."""

    # Positions that a token sees, its own among them; -n: those from the last multiple of n on, a chunk; None: all.
    window: int | None = None
    softcap: float | None = None  # c: a score s counts as c tanh(s / c)
    sinks: Tensor | None = None  # [heads] the score of a key without a value, which takes its share of each softmax

    @classmethod
    def of(
        cls, window: int | None, softcap: float | None, sinks: Tensor | None, module: nn.Module | None = None
    ) -> LayerAttention:
        """Return it for what a layer hands to transformers' attention interface, and for the layer itself."""
        seen = unsaid_window(module) if window is None else window
        if seen is None and softcap is None and sinks is None:
            return FULL
        return cls(window=seen, softcap=softcap, sinks=sinks)

    @property
    def needs_scores(self) -> bool:
        """Return whether scores are changed before their softmax, which torch's own attention cannot do."""
        return self.softcap is not None or self.sinks is not None


FULL = LayerAttention()


def unsaid_window(layer: Any) -> int | None:
    """Return the window or chunks of a layer that hands nothing but a mask of them to the interface.

    Where a config names no kinds of layers, its window is that of all.
    """
    config: Any = getattr(layer, "config", None)
    kinds = getattr(config, "layer_types", None)
    kind = kinds[layer.layer_idx] if kinds else "sliding_attention"
    if kind == "chunked_attention":
        return -int(config.attention_chunk_size)
    return getattr(config, "sliding_window", None) if kind == "sliding_attention" else None


def at_positions(layer: Any, query: Tensor, positions: Tensor) -> Tensor:
    """Return queries, [..., tokens, dim], scaled by their positions where the layer has done so by their places.

    Those are Llama 4's layers without rope, which take a pass for one sequence: arXiv 2501.19399.
    """
    if not getattr(layer, "attn_temperature_tuning", False) or layer.use_rope:
        return query
    both = torch.stack([positions, torch.arange(len(positions), device=positions.device)]).float()
    wanted, found = torch.log1p(torch.floor((both + 1) / layer.floor_scale)) * layer.attn_scale + 1
    scaled: Tensor = query * (wanted.to(query.dtype) / found.to(query.dtype))[:, None]
    return scaled


def last_seen(visible: Tensor, window: int) -> Tensor:
    """Return which keys a window leaves of the visible ones, bool [..., keys], in the order of their positions.

    The keys that a token sees have one position each, up to its own. So a window of positions is as many of the last
    ones, wherever they are stored and whatever stands between them. A chunk's are as many as its token is away from its
    start.
    """
    most = window if window > 0 else (visible.sum(-1, keepdim=True) - 1) % -window + 1
    return visible & (visible.flip(-1).cumsum(-1, dtype=torch.int32).flip(-1) <= most)


def attend_by_scores(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    *,
    mask: Tensor,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attend with scores written out: [..., Q, dim], [..., S, dim] -> [..., Q, dim].

    The mask is [..., Q, S], sinks are [..., Q, 1], or what broadcasts to these.
    """
    scores = (query * scale) @ key.transpose(-1, -2)
    if softcap is not None:
        scores = (scores / softcap).tanh() * softcap
    scores = scores + mask
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)], -1)
    weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32))
    return weights[..., : key.shape[-2]].to(value.dtype) @ value


@contextmanager
def narrowed(model: PreTrainedModel, longest_tokens: float = math.inf) -> Iterator[None]:
    """Narrow a model's windows so that they show in short sequences, unless no row of `longest_tokens` reaches them.

    Its own masks and its layers follow the config and the modules. A model in which only some of these do is found out.
    """
    config = model.config.get_text_config()
    owners: list[Any] = [config, *model.modules()]
    reached = [name for name in _LONG if (getattr(config, name, None) or math.inf) < longest_tokens]
    before = [
        (each, name, own) for name in reached for each in owners if (own := getattr(each, name, None)) is not None
    ]
    try:
        for each, name, _ in before:
            setattr(each, name, _SHORT)
        yield
    finally:
        for each, name, own in before:
            setattr(each, name, own)
