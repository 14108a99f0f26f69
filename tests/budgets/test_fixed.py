"""The fixed budget, and what the base promises to all."""

from __future__ import annotations

import numpy as np
import pytest

from rhymerl.budgets import Budget, FixedBudget
from rhymerl.drafts import Draft, DraftBatch
from rhymerl.testing import make_requests

SCORED = DraftBatch.pack(
    [
        Draft(token_ids=[5, 6, 7], parents=[-1, 0, -1], scores=[0.6, 0.3, 0.1]),
        Draft(token_ids=[5, 6], parents=[-1, 0]),
    ]
)


def test_every_request_gets_the_same():
    budget = FixedBudget(7)
    assert budget.max_nodes == 7
    assert budget.limits(make_requests(3)).tolist() == [7, 7, 7]


@pytest.mark.parametrize(
    ("min_probability", "kept"),
    [(0.0, [True] * 5), (0.3, [True, True, False, True, True]), (0.5, [True, False, False, True, True])],
)
def test_improbable_nodes_are_dropped_and_those_without_a_score_kept(min_probability, kept):
    assert FixedBudget(min_probability=min_probability).trim(make_requests(2), SCORED).tolist() == kept


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"nodes": -1}, "^nodes=-1: expected at least 0"), ({"min_probability": 1.5}, "^min_probability=1.5")],
)
def test_settings_out_of_range_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        FixedBudget(**settings)


class Minimal(Budget):
    max_nodes = 2

    def limits(self, requests):
        return np.full(len(requests), 2, np.int32)


def test_the_base_trims_nothing_and_has_no_metrics():
    assert Minimal().trim(make_requests(2), SCORED).tolist() == [True] * 5
    assert Minimal().metrics() == {}
