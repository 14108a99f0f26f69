"""The covering array: each allowed pair meets, no forbidden one does, and there are few rows."""

from __future__ import annotations

from itertools import product
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.combinations.covering import all_pairs, covering_array, pair, pairs_of
from tests.combinations.factors import FACTORS, FORBIDDEN, ROWS

factor_sizes = st.lists(st.integers(1, 4), min_size=2, max_size=5)


def factors_of(sizes: list[int]) -> dict[str, list[str]]:
    return {f"f{i}": [str(value) for value in range(size)] for i, size in enumerate(sizes)}


def test_pairs_are_of_two_factors() -> None:
    assert all_pairs({"a": "12", "b": "3"}) == {pair(("a", "1"), ("b", "3")), pair(("a", "2"), ("b", "3"))}
    assert pairs_of({"a": "1", "b": "2", "c": "3"}) == {
        pair(("a", "1"), ("b", "2")),
        pair(("a", "1"), ("c", "3")),
        pair(("b", "2"), ("c", "3")),
    }


@given(factor_sizes, st.integers(0, 3), st.data())
def test_all_allowed_pairs_meet_and_no_other(sizes: list[int], seed: int, data: st.DataObject) -> None:
    """Judged by the whole product, in which a pair is possible if some row without forbidden pairs has it."""
    factors = factors_of(sizes)
    known = sorted(all_pairs(factors), key=sorted)
    forbidden = set(data.draw(st.lists(st.sampled_from(known), max_size=3)))
    whole = [pairs_of(dict(zip(factors, values, strict=True))) for values in product(*factors.values())]
    possible = set().union(*(pairs for pairs in whole if not pairs & forbidden))
    if possible != set(known) - forbidden:
        with pytest.raises(ValueError, match="leaves no row"):
            covering_array(factors, forbidden=forbidden, seed=seed)
        return
    rows = covering_array(factors, forbidden=forbidden, seed=seed)
    assert rows == covering_array(factors, forbidden=forbidden, seed=seed)
    assert all(list(row) == list(factors) for row in rows)
    assert set().union(*map(pairs_of, rows)) == possible
    assert len(rows) <= prod(sizes)


def test_rows_are_few() -> None:
    """Nine are enough for four factors of three values, the least that there can be; 81 are all."""
    assert len(covering_array(factors_of([3, 3, 3, 3]))) <= 11
    assert len(covering_array(factors_of([2] * 10))) <= 10


def test_another_seed_has_other_rows() -> None:
    factors = factors_of([3, 3, 3, 3])
    assert covering_array(factors, seed=1) != covering_array(factors, seed=2)


def test_the_rows_of_the_runs() -> None:
    """As the slow test runs them: each allowed pair of its factors, in few rows."""
    assert set().union(*map(pairs_of, ROWS)) == all_pairs(FACTORS) - set(FORBIDDEN)
    most = sorted(map(len, FACTORS.values()))[-2:]
    assert prod(most) <= len(ROWS) <= 1.3 * prod(most)
