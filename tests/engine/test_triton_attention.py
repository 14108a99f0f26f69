"""The kernel of attention under Triton's interpreter, against softmax written out. The interpreter has no bfloat16."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
import torch

from tests.engine.interpreted import Interpreter
from tests.products import values_first

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
SLOTS = 300


@pytest.fixture(scope="module")
def kernel():
    with Interpreter("rhymerl.engine.triton_attention:attend") as interpreter:
        yield interpreter


def row(source, *, before: int, chain: int, parents: list[int]):
    """Slots, seen and ancestors of a row that has `before` keys and feeds `chain` tokens with a draft tree below."""
    slots = source.permutation(SLOTS)[: before + chain + len(parents)]
    bits: list[int] = []
    for node, parent in enumerate(parents):
        bits.append((bits[parent] if parent >= 0 else 0) | 1 << node)
    seen = [*range(before + 1, before + chain + 1), *[before + chain] * len(parents)]
    return slots, seen, [0] * chain + bits, before + chain


def laid_out(rows, most: int):
    """Arrays of a `TileLayout`, with two tiles of nothing at the end."""
    tiles, seen, ancestors, slots = [], [], [], []
    for of_row, sees, bits, root in rows:
        for begin in range(0, len(sees), most):
            count = min(most, len(sees) - begin)
            tiles.append([len(seen) + begin, count, len(slots), root, len(of_row) - len(sees) + begin + count])
        seen, ancestors, slots = [*seen, *sees], [*ancestors, *bits], [*slots, *of_row]
    arrays = {"tiles": [*tiles, [0] * 5, [0] * 5], "seen": seen, "kv_slots": slots}
    return {
        **{name: torch.tensor(np.array(each), dtype=torch.int32) for name, each in arrays.items()},
        "ancestors": torch.tensor(ancestors),
    }


def expected(query, keys, values, rows, scale: float):
    out, n, groups = np.empty(query.shape), 0, query.shape[1] // keys.shape[1]
    for slots, sees, bits, root in rows:
        for leading, mask in zip(sees, bits, strict=True):
            visible = [*slots[:leading], *(slot for node, slot in enumerate(slots[root:]) if mask >> node & 1)]
            for head in range(query.shape[1]):
                at = scale * keys[visible, head // groups] @ query[n, head]
                weights = np.exp(at - at.max())
                out[n, head] = weights @ values[visible, head // groups] / weights.sum()
            n += 1
    return out


@pytest.mark.parametrize(
    ("shape", "most", "dtype"),
    values_first([(4, 4, 16), (6, 2, 24), (7, 1, 64)], [8, 2], [torch.float32, torch.float16]),
)
def test_it_is_softmax_over_what_a_token_sees(kernel, shape, most, dtype):
    heads, kv_heads, dim = shape
    source = np.random.default_rng(dim + most)
    rows = [
        row(source, before=0, chain=1, parents=[]),
        row(source, before=63, chain=1, parents=[-1, 0, 0, 1, -1, 4, 3]),  # the root is the last key of a block
        row(source, before=64, chain=70, parents=[-1, -1]),
        row(source, before=5, chain=1, parents=[-1, *range(62)]),  # as many nodes as there are bits
        row(source, before=130, chain=3, parents=[]),
    ]
    size = sum(len(each[1]) for each in rows), heads, dim
    query, keys, values = (
        torch.from_numpy(source.normal(size=each)).to(dtype) for each in (size, *[(SLOTS, kv_heads, dim)] * 2)
    )
    found = kernel(query, keys, values, **laid_out(rows, most), scale=0.3, most=most)
    arrays = [each.double().numpy() for each in (query, keys, values)]
    tolerance = 1e-5 if dtype == torch.float32 else 4e-3
    np.testing.assert_allclose(found.double(), expected(*arrays, rows, 0.3), atol=tolerance, rtol=0)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_does_not_become_finite(kernel, value):
    rows = [row(np.random.default_rng(0), before=3, chain=1, parents=[])]
    query, keys = torch.full((1, 2, 16), value), torch.ones(SLOTS, 2, 16)
    found = kernel(query, keys, keys, **laid_out(rows, 8), scale=1.0, most=8)
    assert not found.isfinite().any()


@pytest.mark.parametrize("groups", [1, 2, 3, 7, 8, 16, 71])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tile_has_as_many_lines_as_a_product_needs(groups, dtype):
    from rhymerl.engine.triton_attention import tokens_of_a_tile

    padded = 1 << (groups - 1).bit_length()
    for widest in (1, 2, 17, 5000):
        assert 16 <= padded * tokens_of_a_tile(groups, dtype, widest=widest) <= max(64, padded)
