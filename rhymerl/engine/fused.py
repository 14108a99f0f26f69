"""Compiled float32 CPU steps of a Llama-like layer, for `engine/direct.py`: each replaces ten torch operations."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rhymerl.compiled import compiled
from rhymerl.types import IndexArray

SingleArray = npt.NDArray[np.float32]


@compiled
def add_rms_norm(
    hidden: SingleArray, change: SingleArray, weight: SingleArray, epsilon: float, out: SingleArray
) -> None:
    """hidden += change; out = weight * hidden / sqrt(mean(hidden ** 2) + epsilon). All [N, H] but weight [H]."""
    tokens, width = hidden.shape
    for n in range(tokens):
        squares = np.float32(0)
        for i in range(width):
            value = hidden[n, i] + change[n, i]
            hidden[n, i] = value
            squares += value * value
        scale = np.float32(1) / np.sqrt(squares / np.float32(width) + np.float32(epsilon))
        for i in range(width):
            out[n, i] = weight[i] * (hidden[n, i] * scale)


@compiled
def rms_norm(heads: SingleArray, weight: SingleArray, epsilon: float) -> None:
    """Normalize each head by itself, in place: [N, heads, dim], weight [dim]."""
    tokens, num_heads, width = heads.shape
    for n in range(tokens):
        for head in range(num_heads):
            squares = np.float32(0)
            for i in range(width):
                squares += heads[n, head, i] * heads[n, head, i]
            scale = np.float32(1) / np.sqrt(squares / np.float32(width) + np.float32(epsilon))
            for i in range(width):
                heads[n, head, i] = weight[i] * (heads[n, head, i] * scale)


@compiled
def rotate_and_store(
    query: SingleArray,
    key: SingleArray,
    value: SingleArray,
    cos: SingleArray,
    sin: SingleArray,
    slots: IndexArray,
    keys: SingleArray,
    values: SingleArray,
) -> None:
    """Rotate `query` [N, heads, dim] in place, and store rotated `key` and `value` at `slots` [N].

    `key` and `value` are [N, kv_heads, dim]. Rotary embedding (arXiv 2104.09864) in halves, as in Llama: `cos` and
    `sin` [N, dim] repeat themselves after dim / 2.
    """
    tokens, num_heads, dim = query.shape
    half = dim // 2
    c, s = np.empty(half, np.float32), np.empty(half, np.float32)
    a, b = np.empty(half, np.float32), np.empty(half, np.float32)
    for n in range(tokens):
        slot = slots[n]
        for i in range(half):
            c[i], s[i] = cos[n, i], sin[n, i]
        for head in range(num_heads):
            for i in range(half):
                a[i], b[i] = query[n, head, i], query[n, head, i + half]
            for i in range(half):
                query[n, head, i] = a[i] * c[i] - b[i] * s[i]
            for i in range(half):
                query[n, head, i + half] = b[i] * c[i] + a[i] * s[i]
        for head in range(key.shape[1]):
            for i in range(half):
                a[i], b[i] = key[n, head, i], key[n, head, i + half]
            for i in range(half):
                keys[slot, head, i] = a[i] * c[i] - b[i] * s[i]
            for i in range(half):
                keys[slot, head, i + half] = b[i] * c[i] + a[i] * s[i]
            for i in range(dim):
                values[slot, head, i] = value[n, head, i]
