"""Compiled attention for rows with few query tokens on a CPU: no gather, no padding, no mask.

Decoding is bound by reading keys and values once, so a loop that reads them in place beats any batched product. What a
token sees is a list of slots: the leading ones of its row, then its own ancestors in the draft tree.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rhymerl.compiled import compiled
from rhymerl.types import IndexArray

# Of query and key in a row: up to here the loop wins over the batched product, with one query always.
_MOST_PAIRS = 1_200

FloatingArray = npt.NDArray[np.floating]
SlotArray = npt.NDArray[np.uint64]  # unsigned: no check for indices that count from the end


# Parents of tokens that have none in the pass.
ROOT, CHAIN = -1, -2


def suits_paging(width: IndexArray, num_keys: IndexArray) -> npt.NDArray[np.bool_]:
    """Return which rows, of so many query tokens and keys, the loop should take."""
    paged: npt.NDArray[np.bool_] = (width == 1) | (width * num_keys <= _MOST_PAIRS)
    return paged


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedLayout:
    """The slots that a pass's N tokens see: their row's leading slots and, in a draft, their ancestors."""

    table: IndexArray  # [R, C] slots of every row, as in `Rows`
    row: IndexArray  # [N] line of the table; below 0 for tokens that are left to others
    seen: IndexArray  # [N] leading slots of that line
    parent: IndexArray  # [N] index of a draft node's parent in the pass, ROOT for the uppermost, CHAIN for no node
    slot: IndexArray  # [N]


@compiled
def _score(q: FloatingArray, keys: FloatingArray, kv: int, visible: SlotArray, count: int, out: FloatingArray) -> None:
    """out[j] = q @ keys[visible[j], kv]; four at a time keep the arithmetic busy while memory is waited for."""
    zero = q.dtype.type(0)
    fours = count - count % 4
    for j in range(0, fours, 4):
        a, b, c, d = visible[j], visible[j + 1], visible[j + 2], visible[j + 3]
        at_a = at_b = at_c = at_d = zero
        for i in range(len(q)):
            at_a += q[i] * keys[a, kv, i]
            at_b += q[i] * keys[b, kv, i]
            at_c += q[i] * keys[c, kv, i]
            at_d += q[i] * keys[d, kv, i]
        out[j], out[j + 1], out[j + 2], out[j + 3] = at_a, at_b, at_c, at_d
    for j in range(fours, count):
        score = zero
        for i in range(len(q)):
            score += q[i] * keys[visible[j], kv, i]
        out[j] = score


@compiled
def _mix(
    weights: FloatingArray, values: FloatingArray, kv: int, visible: SlotArray, count: int, total: FloatingArray
) -> None:
    """total += weights @ values[visible, kv]."""
    fours = count - count % 4
    for j in range(0, fours, 4):
        a, b, c, d = visible[j], visible[j + 1], visible[j + 2], visible[j + 3]
        of_a, of_b, of_c, of_d = weights[j], weights[j + 1], weights[j + 2], weights[j + 3]
        for i in range(len(total)):
            two = of_a * values[a, kv, i] + of_b * values[b, kv, i]
            total[i] += two + of_c * values[c, kv, i] + of_d * values[d, kv, i]
    for j in range(fours, count):
        for i in range(len(total)):
            total[i] += weights[j] * values[visible[j], kv, i]


@compiled
def _exp(weights: FloatingArray, count: int) -> float:
    """weights = exp(weights - their largest), and their sum."""
    largest = weights[0]
    for j in range(1, count):
        largest = max(largest, weights[j])
    norm = 0.0
    for j in range(count):
        weights[j] = math.exp(weights[j] - largest)
        norm += weights[j]
    return norm


@compiled
def _exp_single(
    weights: FloatingArray, count: int, exponent: npt.NDArray[np.int32], power: npt.NDArray[np.float32]
) -> float:
    """The same to a float32's precision, vectorised: 2^y = 2^whole * 2^part, from bits and a polynomial. NaN stays NaN.

    `power` is a view of `exponent`.
    """
    f = np.float32
    largest = weights[0]
    for j in range(1, count):
        largest = max(largest, weights[j])
    for j in range(count):
        y = f(weights[j] - largest) * f(1.44269504)
        if y < f(-126.0):
            y = f(-126.0)
        whole = np.int32(y - f(0.5))
        part = y - f(whole)
        exponent[j] = (whole + np.int32(127)) << np.int32(23)
        tail = (f(1.5353362e-4) * part + f(1.3398874e-3)) * part + f(9.6184374e-3)
        tail = ((tail * part + f(5.5503325e-2)) * part + f(2.4022648e-1)) * part + f(6.9314720e-1)
        weights[j] = tail * part + f(1.0)
    norm = f(0.0)
    for j in range(count):
        weights[j] *= power[j]
        norm += weights[j]
    return float(norm)


@compiled
def _last_seen(visible: SlotArray, leading: int, count: int, window: int) -> int:
    """Keep the `window` keys of the last positions, and return how many there are.

    The `leading` ones are in order; those of a node and its ancestors are in reverse. Below 0 it is a chunk's size.
    """
    if window < 0:
        window = (count - 1) % -window + 1
    first = min(leading, max(0, count - window))
    if first:
        for j in range(first, count):
            visible[j - first] = visible[j]
    return min(count - first, window)


@compiled
def _cap(weights: FloatingArray, count: int, softcap: float) -> None:
    """weights = softcap * tanh(weights / softcap)."""
    for j in range(count if softcap > 0 else 0):
        weights[j] = softcap * math.tanh(weights[j] / softcap)


@compiled
def attend(
    query: FloatingArray,
    keys: FloatingArray,
    values: FloatingArray,
    table: IndexArray,
    row: IndexArray,
    seen: IndexArray,
    parent: IndexArray,
    slot: IndexArray,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: FloatingArray | None,
    out: FloatingArray,
) -> None:
    """Write out = softmax(scale * query @ keys) @ values.

    Query and out are [N, heads, dim], keys and values [slots, kv_heads, dim]. `window`, `softcap` and `sinks` are those
    of a `LayerAttention`: all of them, or None, for which nothing is compiled. No window is one of all keys, no cap is
    0, and no sink is one of -inf. A window below 0 is a chunk.
    """
    num_tokens, num_heads, dim = query.shape
    groups = num_heads // keys.shape[1]
    longest = num_tokens
    for n in range(num_tokens):
        longest = max(longest, seen[n] + num_tokens)
    visible, weights = np.empty(longest, np.uint64), np.empty(longest + 1, query.dtype)
    exponent = np.empty(longest + 1, np.int32)
    power = exponent.view(np.float32)
    # Whole arrays and local buffers, no slices: a slice costs more than what is done with it.
    q, total = np.empty(dim, query.dtype), np.empty(dim, query.dtype)
    for n in range(num_tokens):
        if row[n] < 0:
            continue
        count = seen[n]
        for j in range(count):
            visible[j] = table[row[n], j]
        node = -1 if parent[n] == CHAIN else n
        while node >= 0:
            visible[count] = slot[node]
            count += 1
            node = parent[node]
        if window is not None:
            count = _last_seen(visible, seen[n], count, window)
        for head in range(num_heads):
            kv = head // groups
            for d in range(dim):
                q[d] = query[n, head, d] * scale
                total[d] = 0
            _score(q, keys, kv, visible, count, weights)
            if softcap is not None:
                _cap(weights, count, softcap)
            scores = count
            if sinks is not None:
                weights[count] = sinks[head]
                scores += 1
            norm = _exp_single(weights, scores, exponent, power) if query.itemsize == 4 else _exp(weights, scores)
            _mix(weights, values, kv, visible, count, total)
            for d in range(dim):
                out[n, head, d] = total[d] / norm
