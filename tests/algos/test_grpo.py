"""GRPO and its kin: whose answers are compared with what. The loss is tested in test_policy_gradient.py."""

from __future__ import annotations

import pytest
import torch

from rhymerl.algos import GRPO
from tests.algos.batches import make_batch

close = torch.testing.assert_close


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        # Of a pair, half the difference; over its sample deviation |difference| / sqrt(2), plus epsilon.
        ({"scale": "none"}, lambda mine, other: (mine - other) / 2),
        ({}, lambda mine, other: (mine - other) / 2 / ((mine - other).abs() / 2**0.5 + 1e-4)),
        ({"baseline": "leave_one_out", "scale": "none"}, lambda mine, other: mine - other),
        ({"baseline": "none", "scale": "none"}, lambda mine, other: mine),
    ],
    ids=["group", "scaled", "leave_one_out", "none"],
)
def test_advantages_of_pairs_by_hand(settings, expected):
    batch, _ = make_batch()
    other = batch.rewards[torch.tensor([1, 0, 3, 2, 5, 4])]
    found = GRPO(**settings).advantages(batch)
    assert found.shape == batch.mask.shape
    close(found, expected(batch.rewards, other)[:, None].expand(6, 5))


def test_no_baseline_and_whitening_is_reinforce_plus_plus():
    """Rewards over the batch, weighted with the number of tokens; the group does not matter."""
    batch, _ = make_batch()
    algorithm = GRPO(baseline="none", scale="none", whiten=True)
    found = algorithm.prepare(batch)
    weights = batch.lengths.double() / batch.lengths.sum()
    mean = (weights * batch.rewards).sum()
    variance = (weights * (batch.rewards - mean) ** 2).sum() * batch.lengths.sum() / (batch.lengths.sum() - 1)
    close(found.advantages[:, 0], (batch.rewards - mean) / (variance + 1e-8).sqrt())


@pytest.mark.parametrize("settings", [{}, {"baseline": "leave_one_out", "scale": "none"}, {"baseline": "none"}])
def test_a_group_of_one_is_refused(settings):
    with pytest.raises(ValueError, match="^group_size=1: GRPO compares"):
        GRPO(**settings).check(group_size=1)


def test_a_group_of_one_will_do_where_nothing_is_compared_in_it():
    GRPO(baseline="none", scale="batch").check(group_size=1)
    GRPO().check(group_size=2)
