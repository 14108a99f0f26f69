"""Dealing samples to ranks: each exactly once, always alike, and nobody gets much more than the others."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rhymerl.training.batches import passes_of
from rhymerl.training.passes import balance, balance_samples
from tests.models.test_logprobs import make_samples

lengths = st.lists(st.integers(1, 10_000), max_size=60)


@given(lengths, st.integers(1, 12))
def test_every_sample_goes_to_one_rank(num_tokens, num_ranks):
    dealt = balance(num_tokens, num_ranks)
    assert len(dealt) == num_ranks
    assert sorted(i for part in dealt for i in part) == list(range(len(num_tokens)))
    assert balance(list(num_tokens), num_ranks) == dealt


@given(lengths, st.integers(1, 12))
def test_no_rank_gets_more_than_the_mean_and_the_longest(num_tokens, num_ranks):
    loads = [sum(num_tokens[i] for i in part) for part in balance(num_tokens, num_ranks)]
    assert max(loads) <= sum(num_tokens) / num_ranks + max(num_tokens, default=0)


@pytest.mark.parametrize(
    ("num_tokens", "num_ranks", "expected"),
    [
        ([3, 9, 4, 5], 2, [[1, 0], [3, 2]]),  # 9 | 5; 9 | 5 + 4; then 3 more for the first of two that have 9
        ([7, 7, 7], 2, [[0, 2], [1]]),
        ([5], 3, [[0], [], []]),
        ([], 2, [[], []]),
        ([2, 8, 5], 1, [[1, 2, 0]]),
    ],
)
def test_by_hand(num_tokens, num_ranks, expected):
    assert balance(num_tokens, num_ranks) == expected


def test_answers_of_all_lengths_are_dealt_evenly():
    num_tokens = (100 + np.random.default_rng(0).lognormal(6, 1, 256)).astype(int).tolist()
    loads = [sum(num_tokens[i] for i in part) for part in balance(num_tokens, 8)]
    assert max(loads) < 1.01 * np.mean(loads)


@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 7])
def test_ranks_in_step_make_as_many_passes_and_keep_each_sample_once(num_ranks, shares):
    samples = make_samples(5)
    dealt = balance_samples(samples, range(5), num_ranks, shares=shares)
    passes = [passes_of(rank, samples, dealt, 60, shares=shares, in_step=True) for rank in range(num_ranks)]
    assert len({len(mine) for mine in passes}) == 1
    kept = [i for mine in passes for each in mine if not each.is_idle for i in each.samples]
    assert sorted(kept) == list(range(5))
    for rank, mine in enumerate(passes):
        own = passes_of(rank, samples, dealt, 60, shares=shares)
        assert [each for each in mine if not each.is_idle] == own
        idle = mine[len(own) :]
        assert all(each.is_idle and len(each.samples) == 1 for each in idle)
