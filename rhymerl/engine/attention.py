"""Attention of packed rows over the KV store, plugged into transformers as an attention implementation.

A pass is one packed sequence [1, N] in which every row has its own few query tokens. The plan, made once a
pass and used by every layer, groups the rows by width so that a long prompt does not pad a short row.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from rhymerl.engine.narrow import NarrowLayout, attend
from rhymerl.policy import evaluating

NAME = "rhymerl"
# Arguments by which transformers asks for what a token tree would silently break. Not `sliding_window`: the models that
# have one are run where nothing is as long (see support.py).
_REFUSED = ("softcap", "s_aux", "position_bias", "cross_attention_states")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Rows of like width, padded to Q queries and S keys."""

    kv_slots: Tensor  # [rows * S] slots to read; padding reads slot 0
    mask: Tensor  # [rows, Q, S] True = visible
    queries: Tensor | None  # [rows, Q] places in the packed pass; None = rows are the pass, one token each
    valid: Tensor | None  # [rows, Q] which of them are real; None = all

    @property
    def shape(self) -> torch.Size:
        return self.mask.shape


@dataclass(slots=True)
class AttentionPlan:
    """All rows of a pass; additive masks are made once, in the dtype that the first layer brings."""

    buckets: list[Bucket]
    narrow: NarrowLayout | None = None
    _additive: list[Tensor] | None = None

    def additive_masks(self, query: Tensor, groups: int) -> list[Tensor]:
        """[rows, 1, groups * Q, S] with 0 where visible and -inf elsewhere."""
        if self._additive is None:
            self._additive = [self._additive_mask(bucket, query, groups) for bucket in self.buckets]
        return self._additive

    @staticmethod
    def _additive_mask(bucket: Bucket, query: Tensor, groups: int) -> Tensor:
        rows, width, keys = bucket.shape
        zeros = torch.zeros(rows, width, keys, dtype=query.dtype, device=query.device)
        mask = zeros.masked_fill_(~bucket.mask, float("-inf"))
        return mask[:, None, None].expand(rows, 1, groups, width, keys).reshape(rows, 1, groups * width, keys)


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    rhymerl_plan: AttentionPlan,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query [1, heads, N, dim]; key and value: the whole layer of the store, [slots, kv_heads, dim]. -> [1, N, heads, dim].

    Grouped-query heads ride along as extra query rows of their KV head, so keys are never repeated.
    """
    for name in _REFUSED:
        if kwargs.get(name) is not None:
            raise TypeError(f"this model's attention uses {name}, which a token tree would silently break")
    num_heads, num_tokens = query.shape[1], query.shape[2]
    kv_heads = key.shape[1]
    groups = num_heads // kv_heads
    packed = query[0].transpose(0, 1)  # [N, heads, dim]
    output = value.new_empty(num_tokens, num_heads, value.shape[2])
    if rhymerl_plan.narrow is not None:
        _attend_narrow(rhymerl_plan.narrow, query[0], key, value, scaling or query.shape[3] ** -0.5, output)
    masks = rhymerl_plan.additive_masks(query, groups)
    for bucket, mask in zip(rhymerl_plan.buckets, masks, strict=True):
        rows, width, keys = bucket.shape
        chosen = packed if bucket.queries is None else packed[bucket.queries.flatten()]
        q = chosen.reshape(rows, width, kv_heads, groups, -1).permute(0, 2, 3, 1, 4).flatten(2, 3)
        k = key.index_select(0, bucket.kv_slots).view(rows, keys, kv_heads, -1).transpose(1, 2)
        v = value.index_select(0, bucket.kv_slots).view(rows, keys, kv_heads, -1).transpose(1, 2)
        out = F.scaled_dot_product_attention(q, k.to(q.dtype), v.to(q.dtype), attn_mask=mask, scale=scaling)
        out = out.view(rows, kv_heads, groups, width, -1).permute(0, 3, 1, 2, 4).reshape(rows, width, num_heads, -1)
        if bucket.queries is None:
            return out.transpose(0, 1), None
        assert bucket.valid is not None
        output[bucket.queries[bucket.valid]] = out[bucket.valid].to(output.dtype)
    return output[None], None


def _attend_narrow(
    narrow: NarrowLayout, query: Tensor, key: Tensor, value: Tensor, scale: float, output: Tensor
) -> None:
    n = narrow
    arrays = (n.table, n.row, n.seen, n.parent, n.slot, n.is_node, n.place)
    attend(query.contiguous().numpy(), key.numpy(), value.numpy(), *arrays, scale, output.numpy())


AttentionInterface.register(NAME, packed_attention)


@contextmanager
def packed(model: PreTrainedModel) -> Iterator[None]:
    """Within: the model runs in eval mode with packed attention, in inference mode. After: as it was, module by module."""
    implementation = model.config._attn_implementation
    with evaluating(model), torch.inference_mode():
        model.config._attn_implementation = NAME
        try:
            yield
        finally:
            model.config._attn_implementation = implementation
