"""The tokens per request and pass, against trying all numbers of nodes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rhymerl.backends.sglang.nodes import LARGEST, best_n
from rhymerl.costs import CostCurve

FLAT = CostCurve([[1, 1.0], [10_000, 1.001]])
STEEP = CostCurve([[1, 1.0], [2, 2.0]])


def test_free_nodes_are_all_taken():
    assert best_n(FLAT, 8, 0.9) == LARGEST


def test_nodes_that_cost_as_much_as_tokens_are_not():
    assert best_n(STEEP, 8, 0.9) == 1


@pytest.mark.parametrize("cost", [FLAT, STEEP])
def test_nodes_that_are_never_accepted_are_not(cost):
    assert best_n(cost, 8, 0.0) == 1


@given(
    steps=st.lists(st.tuples(st.integers(1, 300), st.floats(0, 2)), min_size=2, max_size=5),
    rows=st.integers(1, 128),
    accept_rate=st.floats(0, 0.99),
)
def test_no_other_number_makes_more_tokens_a_second(steps, rows, accept_rate):
    tokens, seconds = np.cumsum(np.array([(1, 1.0), *steps]), axis=0).T
    cost = CostCurve(list(zip(tokens.tolist(), seconds.tolist(), strict=True)))

    def rate(n):
        emitted = sum(accept_rate**depth for depth in range(n))
        return emitted / float(cost.seconds(rows, rows * (n - 1), rows))

    best = max(rate(n) for n in range(1, LARGEST + 1))
    assert rate(best_n(cost, rows, accept_rate)) == pytest.approx(best)
