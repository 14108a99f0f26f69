"""Attention of packed rows over the KV store, plugged into transformers as an attention implementation.

A pass is one packed sequence [1, N] in which every row has its own few query tokens. The plan, made once a
pass and used by every layer, groups the rows by width so that a long prompt does not pad a short row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from rhymerl.engine.inputs import Inputs
from rhymerl.engine.kv_store import KVStore
from rhymerl.engine.paged_attention import PagedLayout, attend
from rhymerl.engine.tiles import TileLayout
from rhymerl.models.attention import FULL, LayerAttention, at_positions, attend_by_scores, last_seen
from rhymerl.models.policy import evaluating
from rhymerl.types import IndexArray

NAME = "rhymerl"
_ALL = 2**62  # positions
_MOST_SCORED = 512  # queries whose scores are written out together
# Arguments by which transformers asks for what a token tree would silently break.
_REFUSED = ("position_bias", "cross_attention_states")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Rows of like width, padded to Q queries and S keys."""

    kv_slots: Tensor  # [rows * S] slots to read; padding reads slot 0
    mask: Tensor  # [rows, Q, S] True = visible
    queries: Tensor | None = None  # [rows * Q] indices into the packed pass; None = rows are the pass, one token each
    real: Tensor | None = None  # [T] which of the queries are no padding; None = all
    tokens: Tensor | None = None  # [T] their indices into the packed pass

    @property
    def shape(self) -> torch.Size:
        return self.mask.shape


@dataclass(slots=True)
class AttentionPlan:
    """All rows of a pass; additive masks are made once for each window, in the dtype that the first layer brings."""

    buckets: list[Bucket]
    paged: PagedLayout | None = None
    tiles: TilePlan | None = None  # in place of both
    store: KVStore | None = None  # of passes by transformers, which also need
    positions: Tensor | None = None  # [N]
    _additive: dict[int | None, list[Tensor]] = field(default_factory=dict)

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scale: float, layer: LayerAttention = FULL) -> Tensor:
        """Return [N, heads, dim] from query [N, heads, dim] and a layer's keys and values [slots, kv_heads, dim].

        Grouped-query heads ride along as extra query rows of their KV head, so keys are never repeated.
        """
        if self.tiles is not None:
            return self.tiles.attend(query, keys, values, scale, layer)
        kv_heads = keys.shape[1]
        groups = query.shape[1] // kv_heads
        output = values.new_empty(*query.shape[:2], values.shape[2])
        if self.paged is not None:
            n = self.paged
            arrays = (n.table, n.row, n.seen, n.parent, n.slot)
            given = (*arrays, scale, *_as_compiled(layer, query))
            attend(query.contiguous().numpy(), keys.numpy(), values.numpy(), *given, output.numpy())
        for bucket, mask in zip(self.buckets, self._additive_masks(query, groups, layer.window), strict=True):
            out = self._attend_bucket(bucket, mask, query, keys, values, scale, layer)
            if bucket.real is None or bucket.tokens is None:
                return out
            output.index_copy_(0, bucket.tokens, out.index_select(0, bucket.real).to(output.dtype))
        return output

    @staticmethod
    def _attend_bucket(
        bucket: Bucket,
        mask: Tensor,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        scale: float,
        layer: LayerAttention,
    ) -> Tensor:
        """Attend over the rows of a bucket; -> [rows * Q, heads, dim]."""
        (rows, width, seen), kv_heads = bucket.shape, keys.shape[1]
        chosen = query if bucket.queries is None else query.index_select(0, bucket.queries)
        q = chosen.reshape(rows, width, kv_heads, -1, query.shape[2]).permute(0, 2, 3, 1, 4).flatten(2, 3)
        k = keys.index_select(0, bucket.kv_slots).view(rows, seen, kv_heads, -1).transpose(1, 2)
        v = values.index_select(0, bucket.kv_slots).view(rows, seen, kv_heads, -1).transpose(1, 2)
        k, v = k.to(q.dtype), v.to(q.dtype)
        if layer.needs_scores:
            out = _attend_by_scores(q, k, v, scale, mask, layer)
        else:
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
        out = out.view(rows, kv_heads, -1, width, out.shape[3]).permute(0, 3, 1, 2, 4)
        return out.reshape(rows * width, query.shape[1], -1)

    def _additive_masks(self, query: Tensor, groups: int, window: int | None) -> list[Tensor]:
        """Return masks [rows, 1, groups * Q, S] with 0 where visible and -inf elsewhere."""
        if window not in self._additive:
            self._additive[window] = [self._additive_mask(bucket, query, groups, window) for bucket in self.buckets]
        return self._additive[window]

    @staticmethod
    def _additive_mask(bucket: Bucket, query: Tensor, groups: int, window: int | None) -> Tensor:
        rows, width, keys = bucket.shape
        visible = bucket.mask if window is None or keys <= abs(window) else last_seen(bucket.mask, window)
        zeros = torch.zeros(rows, width, keys, dtype=query.dtype, device=query.device)
        mask = zeros.masked_fill_(~visible, float("-inf"))
        return mask[:, None, None].expand(rows, 1, groups, width, keys).reshape(rows, 1, groups * width, keys)


def _as_compiled(
    layer: LayerAttention, query: Tensor
) -> tuple[int | None, float | None, npt.NDArray[np.floating] | None]:
    """Return window, soft cap and sinks as the compiled loop takes them."""
    if layer is FULL:
        return None, None, None
    none = torch.full(query.shape[1:2], float("-inf"))
    sinks = none if layer.sinks is None else layer.sinks.detach()
    return layer.window or _ALL, layer.softcap or 0.0, sinks.to(query.dtype).numpy()


def _attend_by_scores(
    query: Tensor, keys: Tensor, values: Tensor, scale: float, mask: Tensor, layer: LayerAttention
) -> Tensor:
    """Attend as torch does, [rows, kv_heads, groups * Q, dim], by some queries at a time: prompts have many scores."""
    (_, kv_heads, width, _), sinks = query.shape, layer.sinks
    if sinks is not None:
        sinks = sinks.repeat_interleave(kv_heads * width // len(sinks)).view(1, kv_heads, width, 1)
    found = []
    for start in range(0, width, _MOST_SCORED):
        part = slice(start, start + _MOST_SCORED)
        own = None if sinks is None else sinks[:, :, part]
        arrays = (query[:, :, part], keys, values)
        found.append(attend_by_scores(*arrays, scale, mask=mask[:, :, part], softcap=layer.softcap, sinks=own))
    return torch.cat(found, 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class TilePlan:
    """The attention of a pass by a `TileLayout` with arrays on the device."""

    tiles: Tensor
    positions: Tensor  # [N]
    ancestors: Tensor
    kv_slots: Tensor
    most: int
    splits: int

    @classmethod
    def of(cls, tiles: TileLayout, arrays: Iterable[Tensor], positions: Tensor, *, splits: int = 1) -> TilePlan:
        """Return it for a layout's `arrays` and positions on the device."""
        there, ancestors, kv_slots = arrays
        return cls(
            tiles=there, ancestors=ancestors, kv_slots=kv_slots, positions=positions, most=tiles.most, splits=splits
        )

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scale: float, layer: LayerAttention = FULL) -> Tensor:
        """As `AttentionPlan.attend`."""
        from rhymerl.engine.triton_attention import attend

        arrays = (self.tiles, self.positions, self.ancestors, self.kv_slots)
        return attend(
            query, keys, values, *arrays, scale, most=self.most, splits=self.splits,
            window=layer.window, softcap=layer.softcap, sinks=layer.sinks,
        )  # fmt: skip


@dataclass(slots=True)
class ComparedPlan:
    """Another plan's attention, beside which that of tiles is computed."""

    tiles: TilePlan
    difference: float = 0.0  # the largest so far, as a share of the largest number of its layer
    plan: AttentionPlan | None = None
    store: KVStore | None = None  # of the plan, as are
    positions: Tensor | None = None

    @classmethod
    def of(cls, tiles: TileLayout, positions: IndexArray, inputs: Inputs, *, splits: int) -> ComparedPlan:
        """Return it for a layout and positions [N], which go to the device."""
        *arrays, there = inputs.put([*tiles.arrays, positions])
        return cls(TilePlan.of(tiles, arrays, there, splits=splits))

    def beside(self, plan: AttentionPlan) -> ComparedPlan:
        """Compare with this plan."""
        self.plan, self.store, self.positions = plan, plan.store, plan.positions
        return self

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scale: float, layer: LayerAttention = FULL) -> Tensor:
        """As `AttentionPlan.attend`, in float32 at least: scores in bfloat16 say little of a kernel's."""
        assert self.plan is not None
        found = self.tiles.attend(query, keys, values, scale, layer)
        with torch.autocast(query.device.type, enabled=False):
            wide = query.to(torch.promote_types(query.dtype, torch.float32))
            expected = self.plan.attend(wide, keys, values, scale, layer).to(found.dtype)
        self.difference = max(self.difference, difference_of(found, expected))
        return expected


def difference_of(found: Tensor, expected: Tensor) -> float:
    """Return the largest one, as a share of the largest number that is expected; infinite for what is no number."""
    difference = ((found.double() - expected.double()).abs().max() / expected.double().abs().max()).item()
    return difference if difference == difference else float("inf")


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    rhymerl_plan: AttentionPlan | ComparedPlan,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """`AttentionPlan.attend` as transformers calls it: query [1, heads, N, dim] -> [1, N, heads, dim]."""
    for name in _REFUSED:
        if kwargs.get(name) is not None:
            raise TypeError(f"this model's attention uses {name}, which a token tree would silently break")
    layer, plan = LayerAttention.of(sliding_window, softcap, s_aux, module), rhymerl_plan
    if plan.store is not None:
        plan.store.note(layer.window)
    if key.ndim == 4:  # of the pass's tokens alone, not of the whole store
        assert plan.store is not None, "a pass by transformers has one"
        key, value = plan.store.keep(key, value)
    if plan.positions is not None:
        query = at_positions(module, query, plan.positions)
    output = plan.attend(query[0].transpose(0, 1), key, value, scaling or query.shape[3] ** -0.5, layer)
    return output[None], None


AttentionInterface.register(NAME, packed_attention)


@contextmanager
def packed(model: PreTrainedModel) -> Iterator[None]:
    """Context in which the model runs in eval and inference mode, with packed attention.

    Afterwards it is as it was, module by module.
    """
    implementation = model.config._attn_implementation
    with evaluating(model), torch.inference_mode():
        model.config._attn_implementation = NAME
        try:
            yield
        finally:
            model.config._attn_implementation = implementation
