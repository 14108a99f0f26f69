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
from rhymerl.engine.ragged import IndexArray

MAX_WIDTH = 32  # query tokens of a row up to which the loop wins over the batched product

FloatingArray = npt.NDArray[np.floating]


@dataclass(frozen=True, slots=True, kw_only=True)
class NarrowLayout:
    """N' tokens of narrow rows; `parent` and `place` count tokens of the packed pass."""

    table: IndexArray  # [rows, most leading slots]
    row: IndexArray  # [N'] which line of the table
    seen: IndexArray  # [N'] leading slots of that line
    parent: IndexArray  # [N] packed place of a draft node's parent node, -1 for all other tokens
    slot: IndexArray  # [N] of every packed token
    is_node: npt.NDArray[np.bool_]  # [N]
    place: IndexArray  # [N']


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
    is_node: npt.NDArray[np.bool_],
    place: IndexArray,
    scale: float,
    out: FloatingArray,
) -> None:
    """out[place] = softmax(scale * query @ keys) @ values; query [heads, N, dim], keys/values [slots, kv_heads, dim], out [N, heads, dim]."""
    num_heads, num_tokens, dim = query.shape
    groups = num_heads // keys.shape[1]
    longest = table.shape[1] + num_tokens
    visible = np.empty(longest, np.uint64)  # unsigned: no check for indices that count from the end
    weights = np.empty(longest, query.dtype)
    # Whole arrays and local buffers, no slices: a slice costs more than what is done with it.
    q = np.empty(dim, query.dtype)
    total = np.empty(dim, query.dtype)
    zero = query.dtype.type(0)
    for i in range(len(place)):
        n = place[i]
        count = seen[i]
        for j in range(count):
            visible[j] = table[row[i], j]
        node = n if is_node[n] else -1
        while node >= 0:
            visible[count] = slot[node]
            count += 1
            node = parent[node]
        for head in range(num_heads):
            kv = head // groups
            for d in range(dim):
                q[d] = query[head, n, d] * scale
                total[d] = 0
            largest = -math.inf
            for j in range(count):
                key = visible[j]
                score = zero
                for d in range(dim):
                    score += q[d] * keys[key, kv, d]
                weights[j] = score
                largest = max(largest, float(score))
            norm = 0.0
            for j in range(count):
                weights[j] = math.exp(weights[j] - largest)
                norm += weights[j]
            for j in range(count):
                key, weight = visible[j], weights[j]
                for d in range(dim):
                    total[d] += weight * values[key, kv, d]
            for d in range(dim):
                out[n, head, d] = total[d] / norm
