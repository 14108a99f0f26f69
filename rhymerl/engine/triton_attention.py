"""Attention of a pass as a Triton kernel that reads keys and values where they are stored.

Nothing is gathered, padded or masked beforehand. A tile is a few tokens of one row with all query heads of a key head.
It walks over the row's slots with a running softmax (Milakov and Gimelshein, arXiv 1805.02867). Imported where a device
is one that Triton knows.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 64  # keys
_MANY, _FEW = 64, 16  # lines of a tile: tokens times query heads of a key head


def tokens_of_a_tile(groups: int, dtype: torch.dtype, *, widest: int) -> int:
    """Return the tokens per tile for `groups` query heads a key head and rows of at most `widest` tokens."""
    padded: int = triton.next_power_of_2(groups)
    few = max(_FEW // padded, 1)
    is_small = widest <= few or dtype == torch.float32  # whose products take too many registers otherwise
    return few if is_small else max(_MANY // padded, 1)


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    tiles: Tensor,
    seen: Tensor,
    ancestors: Tensor,
    kv_slots: Tensor,
    scale: float,
    *,
    most: int,
) -> Tensor:
    """Return softmax(scale * query @ keys) @ values, [N, heads, dim] in the values' dtype.

    query is [N, heads, dim], keys and values are [slots, kv_heads, dim]. The other arrays are those of a `TileLayout`,
    with `most` tokens a tile; what a token of no tile gets is undefined. Products are of the values' dtype. One launch,
    which waits for nothing.
    """
    num_heads, dim = query.shape[1:]
    kv_heads = keys.shape[1]
    groups = num_heads // kv_heads
    query, out = query.contiguous(), values.new_empty(query.shape)
    with torch.cuda.device_of(query):
        _attend[(len(tiles), kv_heads)](
            query, keys, values, out, tiles, seen, ancestors, kv_slots, scale * math.log2(math.e),
            groups=groups, kv_heads=kv_heads, dim=dim, padded_groups=triton.next_power_of_2(groups),
            padded_dim=max(triton.next_power_of_2(dim), 16), most=most, block=_BLOCK,
            precision="ieee" if values.dtype == torch.float32 else None, num_warps=4, num_stages=2,
        )  # fmt: skip
    return out


@triton.jit
def _attend(
    query, keys, values, out, tiles, seen, ancestors, kv_slots, scale,
    groups: tl.constexpr, kv_heads: tl.constexpr, dim: tl.constexpr, padded_groups: tl.constexpr, padded_dim: tl.constexpr,
    most: tl.constexpr, block: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    """Write a tile's tokens for one key head; `scale` is for powers of 2."""
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    first, count = tl.load(tiles + 5 * tile), tl.load(tiles + 5 * tile + 1)
    if count == 0:
        return
    begin, root, num_keys = tl.load(tiles + 5 * tile + 2), tl.load(tiles + 5 * tile + 3), tl.load(tiles + 5 * tile + 4)
    lines = tl.arange(0, most * padded_groups)
    token, head = lines // padded_groups, lines % padded_groups
    dims = tl.arange(0, padded_dim)
    is_token, inside = token < count, dims < dim
    is_query = (is_token & (head < groups))[:, None] & inside[None, :]
    of_token = (first + token).to(tl.int64)
    at = ((of_token * kv_heads + kv_head) * groups + head)[:, None] * dim + dims[None, :]
    q = tl.load(query + at, mask=is_query, other=0.0).to(values.dtype.element_ty)
    leading = tl.load(seen + of_token, mask=is_token, other=0)
    nodes = tl.load(ancestors + of_token, mask=is_token, other=0)

    top = tl.full((most * padded_groups,), float("-inf"), tl.float32)
    total = tl.zeros((most * padded_groups,), tl.float32)
    mixed = tl.zeros((most * padded_groups, padded_dim), tl.float32)
    for start in range(0, num_keys, block):
        place = start + tl.arange(0, block)
        is_key = place < num_keys
        slot = tl.load(kv_slots + begin + place, mask=is_key, other=0).to(tl.int64)
        of_key = (slot * kv_heads + kv_head) * dim
        k = tl.load(keys + of_key[None, :] + dims[:, None], mask=is_key[None, :] & inside[:, None], other=0.0).to(
            q.dtype
        )
        v = tl.load(values + of_key[:, None] + dims[None, :], mask=is_key[:, None] & inside[None, :], other=0.0)
        node = place - root
        bit = (nodes[:, None] >> tl.minimum(tl.maximum(node, 0), 63).to(tl.int64)[None, :]) & 1
        visible = (place[None, :] < leading[:, None]) | ((node >= 0)[None, :] & (bit == 1))
        scores = tl.dot(q, k, input_precision=precision).to(tl.float32) * scale
        scores = tl.where(visible & is_key[None, :], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        # A line that sees nothing: -inf less -inf would be no number.
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(weights, 1)
        mixed = mixed * shrink[:, None] + tl.dot(weights.to(q.dtype), v, input_precision=precision)
        top = new_top
    mixed = mixed / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(out + at, mixed.to(out.dtype.element_ty), mask=is_query)
