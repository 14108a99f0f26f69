"""Attention of a pass as a Triton kernel that reads keys and values where they are stored.

Nothing is gathered, padded or masked beforehand. A tile is a few tokens of one row with all query heads of a key head.
It walks over the row's slots with a running softmax (Milakov and Gimelshein, arXiv 1805.02867). Where tiles are few and
rows long, parts of a row's keys go to programs of their own, and a second kernel merges them (Flash-Decoding, Dao et
al., 2023). What a layer has none of (window, soft cap, sinks, parts) is not compiled. Imported where a device is one
that Triton knows.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 64  # keys of a step
_MANY, _FEW = 64, 16  # lines of a tile: tokens times query heads of a key head


def tokens_of_a_tile(groups: int, dtype: torch.dtype, *, widest: int) -> int:
    """Return the tokens per tile for `groups` query heads a key head and rows of at most `widest` tokens."""
    padded: int = triton.next_power_of_2(groups)
    few = max(_FEW // padded, 1)
    is_small = widest <= few or dtype == torch.float32  # whose products take too many registers otherwise
    return few if is_small else max(_MANY // padded, 1)


def block_and_warps(dtype: torch.dtype, of_keys: torch.dtype, dim: int, *, is_plain: bool) -> tuple[int, int]:
    """Return the keys of a step and the warps of a program, so that registers suffice.

    Keys may be stored in float32 where products, of `dtype`, are in 16 bits.
    """
    is_large = dim > 128 or (dtype == torch.float32 and not is_plain)
    return (_BLOCK // 2 if of_keys == torch.float32 and is_large else _BLOCK), (8 if is_large else 4)


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    tiles: Tensor,
    positions: Tensor,
    ancestors: Tensor,
    kv_slots: Tensor,
    scale: float,
    *,
    most: int,
    splits: int = 1,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return softmax(scale * query @ keys) @ values, [N, heads, dim] in the values' dtype.

    query is [N, heads, dim], keys and values are [slots, kv_heads, dim], positions are [N]. The other arrays are those
    of a `TileLayout`, with `most` tokens a tile; what a token of no tile gets is undefined. The keys of a row are
    computed in `splits` parts, a power of 2. `window`, `softcap` and `sinks` are those of a `LayerAttention`; a window
    below 0 is a chunk. Products are of the values' dtype. One launch, or two with parts, which wait for nothing.
    """
    if keys.shape != values.shape:
        raise TypeError(f"keys are {list(keys.shape)} and values {list(values.shape)}")
    num_heads, dim = query.shape[1:]
    kv_heads = keys.shape[1]
    groups, padded_dim = num_heads // kv_heads, max(triton.next_power_of_2(dim), 16)
    query, out = query.contiguous(), values.new_empty(query.shape)
    is_plain = splits == 1 and window is None and softcap is None and sinks is None
    block, num_warps = block_and_warps(values.dtype, keys.dtype, dim, is_plain=is_plain)
    parts, sums = out, None
    if splits > 1:
        parts = values.new_empty((*query.shape[:2], splits, dim), dtype=torch.float32)
        sums = parts.new_empty(parts.shape[:3])
    with torch.cuda.device_of(query):
        _attend[(len(tiles), kv_heads, splits)](
            query, keys, values, parts, sums, sinks, tiles, positions, ancestors, kv_slots, scale * math.log2(math.e),
            groups=groups, kv_heads=kv_heads, dim=dim, padded_groups=triton.next_power_of_2(groups),
            padded_dim=padded_dim, most=most, block=block, splits=splits, window=window, softcap=softcap,
            precision="ieee" if values.dtype == torch.float32 else None, num_warps=num_warps, num_stages=2,
        )  # fmt: skip
        if sums is not None:
            lines = (len(query) * num_heads,)
            _merge[lines](parts, sums, out, dim=dim, padded_dim=padded_dim, splits=splits, num_warps=1)
    return out


@triton.jit
def _attend(
    query, keys, values, out, sums, sinks, tiles, positions, ancestors, kv_slots, scale,
    groups: tl.constexpr, kv_heads: tl.constexpr, dim: tl.constexpr, padded_groups: tl.constexpr, padded_dim: tl.constexpr,
    most: tl.constexpr, block: tl.constexpr, precision: tl.constexpr,
    splits: tl.constexpr, window: tl.constexpr, softcap: tl.constexpr,
):  # fmt: skip
    """Write a tile's tokens for one key head, or a part of them and the log2 of its sum; `scale` is for powers of 2."""
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
    line = (of_token * kv_heads + kv_head) * groups + head
    q = tl.load(query + line[:, None] * dim + dims[None, :], mask=is_query, other=0.0).to(values.dtype.element_ty)
    position = tl.load(positions + of_token, mask=is_token, other=0).to(tl.int32)
    leading = tl.minimum(position + 1, root)
    nodes = tl.load(ancestors + of_token, mask=is_token, other=0)

    begin_key, end_key = 0, num_keys
    if window is not None:
        oldest = position + 1 - window if window > 0 else position // -window * -window  # position that is seen
        hidden = oldest - root  # ancestors, of which those further up have lower bits
        for each in range(tl.max(hidden, 0)):
            nodes = tl.where(each < hidden, nodes & (nodes - 1), nodes)
        begin_key = tl.maximum(tl.min(tl.where(is_token, oldest, num_keys), 0), 0)  # no key stands before its position
    top = tl.full((most * padded_groups,), float("-inf"), tl.float32)
    total = tl.zeros((most * padded_groups,), tl.float32)
    mixed = tl.zeros((most * padded_groups, padded_dim), tl.float32)
    split = tl.program_id(2) if splits > 1 else 0
    if splits > 1:
        keys_of_a_part = tl.cdiv(tl.cdiv(num_keys - begin_key, splits), block) * block
        begin_key += split * keys_of_a_part
        end_key = tl.minimum(begin_key + keys_of_a_part, num_keys)
    if sinks is not None:
        has_sink = is_token & (head < groups) & (split == 0)
        sink = tl.load(sinks + kv_head * groups + head, mask=has_sink, other=float("-inf"))
        top, total = sink.to(tl.float32) * 1.4426950408889634, has_sink.to(tl.float32)
    for start in range(begin_key, end_key, block):
        place = start + tl.arange(0, block)
        is_key = place < end_key
        slot = tl.load(kv_slots + begin + place, mask=is_key, other=0).to(tl.int64)
        of_key = (slot * kv_heads + kv_head) * dim
        k = tl.load(keys + of_key[None, :] + dims[:, None], mask=is_key[None, :] & inside[:, None], other=0.0)
        v = tl.load(values + of_key[:, None] + dims[None, :], mask=is_key[:, None] & inside[None, :], other=0.0)
        node = place - root
        bit = (nodes[:, None] >> tl.minimum(tl.maximum(node, 0), 63).to(tl.int64)[None, :]) & 1
        is_leading = place[None, :] < leading[:, None]
        if window is not None:
            is_leading = is_leading & (place[None, :] >= oldest[:, None])
        visible = is_leading | ((node >= 0)[None, :] & (bit == 1))
        scores = tl.dot(q, k.to(q.dtype), input_precision=precision).to(tl.float32) * scale
        if softcap is not None:  # cap * tanh(scores / cap)
            cap: tl.constexpr = softcap * 1.4426950408889634
            scores = cap * (2 * tl.sigmoid(scores * (2 / cap)) - 1)
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
    part = line * splits + split
    tl.store(out + part[:, None] * dim + dims[None, :], mixed.to(out.dtype.element_ty), mask=is_query)
    if splits > 1:
        tl.store(sums + part, top + tl.log2(total), mask=is_token & (head < groups))


@triton.jit
def _merge(parts, sums, out, dim: tl.constexpr, padded_dim: tl.constexpr, splits: tl.constexpr):
    """Write a token's head: the mean of its parts, weighted by powers of 2."""
    line = tl.program_id(0).to(tl.int64)
    part, dims = line * splits + tl.arange(0, splits), tl.arange(0, padded_dim)
    logs = tl.load(sums + part)
    weights = tl.exp2(logs - tl.max(logs, 0))
    mixed = tl.load(parts + part[:, None] * dim + dims[None, :], mask=(dims < dim)[None, :], other=0.0)
    mean = tl.sum(weights[:, None] * mixed, 0) / tl.sum(weights, 0)
    tl.store(out + line * dim + dims, mean.to(out.dtype.element_ty), mask=dims < dim)
