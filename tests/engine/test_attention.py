"""The compiled attention against softmax written out."""

from __future__ import annotations

import numpy as np
import pytest

from rhymerl.engine.paged_attention import CHAIN, ROOT, attend

HEADS, KV_HEADS, SLOTS, LEADING = 4, 2, 60, 21


def attended(dtype: str, *, dim: int, spread: float, seed: int = 0):
    """A row of three chain tokens and a tree of four nodes below the last: (output, the same written out)."""
    source = np.random.default_rng(seed)
    query, keys, values = (
        source.normal(size=shape).astype(dtype)
        for shape in ((7, HEADS, dim), (SLOTS, KV_HEADS, dim), (SLOTS, KV_HEADS, dim))
    )
    query *= spread
    order = source.permutation(SLOTS)
    table, slot = order[None, :LEADING], np.append(order[LEADING - 3 : LEADING], order[-4:])
    seen = np.array([LEADING - 2, LEADING - 1, LEADING, LEADING, LEADING, LEADING, LEADING])
    parent, out = np.array([CHAIN, CHAIN, CHAIN, ROOT, 3, 3, 5]), np.zeros((7, HEADS, dim), dtype)
    attend(query, keys, values, table, np.zeros(7, np.int64), seen, parent, slot, 0.3, None, None, None, out)
    above = {3: [3], 4: [3, 4], 5: [3, 5], 6: [3, 5, 6]}
    expected = np.empty((7, HEADS, dim))
    for n in range(7):
        visible = [*table[0, : seen[n]], *(slot[node] for node in above.get(n, []))]
        for head in range(HEADS):
            at = 0.3 * keys[visible, head // 2].astype(float) @ query[n, head].astype(float)
            weights = np.exp(at - at.max())
            expected[n, head] = weights @ values[visible, head // 2].astype(float) / weights.sum()
    return out, expected


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 2e-5), ("float64", 1e-13)])
@pytest.mark.parametrize("spread", [0.0, 1.0, 30.0, 1000.0])  # all alike, ... one key takes everything
@pytest.mark.parametrize("dim", [3, 8, 32])
def test_compiled_attention_is_softmax(dim, spread, dtype, tolerance):
    for seed in range(5):
        out, expected = attended(dtype, dim=dim, spread=spread, seed=seed)
        np.testing.assert_allclose(out, expected, atol=tolerance * max(1, spread / 10), rtol=0)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("spread", [np.nan, np.inf])
def test_what_is_not_finite_does_not_become_finite(spread, dtype):
    with np.errstate(invalid="ignore"):
        out, _ = attended(dtype, dim=8, spread=spread)
    assert not np.isfinite(out).any()
