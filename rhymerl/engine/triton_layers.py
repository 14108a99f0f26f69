"""What is between the matrix products of a Llama-like layer, as Triton kernels: one launch where torch needs ten.

All is computed in float32 and rounded once. Imported where a device is one that Triton knows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024  # numbers of a program of `silu_times`


def warps_for(block: int) -> int:
    """Return the warps of a program that holds so many numbers: 16 a thread."""
    return min(max(block // 512, 1), 16)


def add_rms_norm(hidden: Tensor, change: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """hidden += change; return weight * hidden / sqrt(mean(hidden ** 2) + epsilon), [N, H] in the change's dtype."""
    out, width = torch.empty_like(change), hidden.shape[1]
    block = triton.next_power_of_2(width)
    with torch.cuda.device_of(hidden):
        _add_rms_norm[(len(hidden),)](
            hidden, change, weight, out, epsilon, width=width, block=block, num_warps=warps_for(block)
        )
    return out


def turn_and_store(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    keys: Tensor,
    values: Tensor,
    norms: tuple[Tensor, Tensor, float] | None,
) -> Tensor:
    """Store turned keys, and values, [N, kv_heads, dim], at `slots` [N]; return the turned query [N, heads, dim].

    What is of a token stands together; tokens may be apart. `cos` and `sin` [N, dim] repeat themselves after dim / 2.
    `norms` are the weights [dim] by which the heads of queries and of keys are normalised before, and their epsilon.
    The query is of the dtype of keys.
    """
    (num_tokens, heads, dim), kv_heads = query.shape, key.shape[1]
    turned = keys.new_empty(query.shape)
    query_weight, key_weight, epsilon = norms or (cos, cos, 0.0)  # which nobody reads
    with torch.cuda.device_of(query):
        _turn_and_store[(num_tokens, heads + kv_heads)](
            query, key, value, query.stride(0), key.stride(0), value.stride(0), cos, sin, slots, keys, values, turned,
            query_weight, key_weight, epsilon, heads=heads, kv_heads=kv_heads, dim=dim,
            padded_half=triton.next_power_of_2(dim // 2), normalises=norms is not None, num_warps=1,
        )  # fmt: skip
    return turned


def silu_times(gate: Tensor, up: Tensor) -> Tensor:
    """Return gate * sigmoid(gate) * up, [N, F]; what is of a token stands together, tokens may be apart."""
    out, width = gate.new_empty(gate.shape), gate.shape[1]
    with torch.cuda.device_of(gate):
        _silu_times[(len(gate), triton.cdiv(width, _BLOCK))](
            gate, up, gate.stride(0), up.stride(0), out, width, block=_BLOCK, num_warps=4
        )
    return out


@triton.jit
def _add_rms_norm(hidden, change, weight, out, epsilon, width: tl.constexpr, block: tl.constexpr):
    """Normalise a token's numbers."""
    i = tl.arange(0, block)
    inside, at = i < width, tl.program_id(0).to(tl.int64) * width + i
    total = tl.load(hidden + at, mask=inside, other=0.0).to(tl.float32)
    total = (total + tl.load(change + at, mask=inside, other=0.0).to(tl.float32)).to(hidden.dtype.element_ty)
    tl.store(hidden + at, total, mask=inside)
    total = total.to(tl.float32)
    scale = 1 / tl.sqrt(tl.sum(total * total, 0) / width + epsilon)
    scaled = total * scale * tl.load(weight + i, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, scaled.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _turn_and_store(
    query, key, value, query_stride, key_stride, value_stride, cos, sin, slots, keys, values, turned, query_weight,
    key_weight, epsilon, heads: tl.constexpr, kv_heads: tl.constexpr, dim: tl.constexpr, padded_half: tl.constexpr, normalises: tl.constexpr,
):  # fmt: skip
    """Turn a head of a token's query, or turn and store one of its keys, with the value."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    half: tl.constexpr = dim // 2
    i = tl.arange(0, padded_half)
    inside = i < half
    c = tl.load(cos + token * dim + i, mask=inside, other=0.0).to(tl.float32)
    s = tl.load(sin + token * dim + i, mask=inside, other=0.0).to(tl.float32)
    if head < heads:
        at = (token * heads + head) * dim + i
        a, b = _head(query, token * query_stride + head * dim + i, query_weight, epsilon, i, inside, dim, normalises)
        tl.store(turned + at, (a * c - b * s).to(turned.dtype.element_ty), mask=inside)
        tl.store(turned + at + half, (b * c + a * s).to(turned.dtype.element_ty), mask=inside)
    else:
        of_token = (head - heads) * dim + i
        there = tl.load(slots + token).to(tl.int64) * kv_heads * dim + of_token
        a, b = _head(key, token * key_stride + of_token, key_weight, epsilon, i, inside, dim, normalises)
        tl.store(keys + there, (a * c - b * s).to(keys.dtype.element_ty), mask=inside)
        tl.store(keys + there + half, (b * c + a * s).to(keys.dtype.element_ty), mask=inside)
        for part in tl.static_range(2):
            v = tl.load(value + token * value_stride + of_token + part * half, mask=inside)
            tl.store(values + there + part * half, v.to(values.dtype.element_ty), mask=inside)


@triton.jit
def _head(
    heads, at, weight, epsilon, i, inside, dim: tl.constexpr, normalises: tl.constexpr
):  # fmt: skip
    """Return both halves of a head, normalised where the model does that."""
    half: tl.constexpr = dim // 2
    a = tl.load(heads + at, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(heads + at + half, mask=inside, other=0.0).to(tl.float32)
    if normalises:
        scale = 1 / tl.sqrt((tl.sum(a * a, 0) + tl.sum(b * b, 0)) / dim + epsilon)
        a = a * scale * tl.load(weight + i, mask=inside, other=0.0).to(tl.float32)
        b = b * scale * tl.load(weight + half + i, mask=inside, other=0.0).to(tl.float32)
    return a, b


@triton.jit
def _silu_times(gate, up, gate_stride, up_stride, out, width, block: tl.constexpr):
    """Gate some of a token's numbers."""
    token, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * block + tl.arange(0, block)
    inside = i < width
    g = tl.load(gate + token * gate_stride + i, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + token * up_stride + i, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * width + i, (g * tl.sigmoid(g) * u).to(out.dtype.element_ty), mask=inside)
