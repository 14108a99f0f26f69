"""The window rule: wider after a draft that was accepted whole, back to the start after a rejection."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rhymerl.budgets import AIMDBudget
from rhymerl.drafts import DraftBatch
from rhymerl.testing import make_requests
from tests.budgets.passes import chain, outcome_of


def learn(budget: AIMDBudget, requests, passes) -> None:
    """One pass: (nodes, how many of them were accepted) of each request."""
    drafts = DraftBatch.pack([chain(nodes) for nodes, _ in passes])
    accepted = np.concatenate([np.arange(nodes) < count for nodes, count in passes])
    budget.learn(outcome_of(drafts, accepted, requests=requests))


@pytest.mark.parametrize(
    ("settings", "passes", "windows"),
    [
        ({}, [(2, 2), (4, 4), (6, 6)], [2, 4, 6, 8]),
        ({}, [(2, 2), (4, 3), (2, 2)], [2, 4, 2, 4]),
        ({}, [(2, 0), (2, 1)], [2, 2, 2]),
        ({}, [(2, 2), (1, 1)], [2, 4, 6]),  # the drafter had no more to say
        ({}, [(2, 2), (0, 0), (4, 4)], [2, 4, 4, 6]),  # a pass without a draft says nothing
        ({"nodes": 5}, [(2, 2), (4, 4), (5, 5), (5, 1)], [2, 4, 5, 5, 2]),
        ({"start": 3, "increase": 5}, [(3, 3), (8, 7)], [3, 8, 3]),
        ({"nodes": 2, "start": 4}, [(2, 2)], [2, 2]),
        ({"increase": 0}, [(2, 2)], [2, 2]),
    ],
)
def test_window(settings, passes, windows):
    budget, requests = AIMDBudget(**settings), make_requests(1)
    assert budget.max_nodes == settings.get("nodes", 32)
    found = budget.limits(requests).tolist()
    for each in passes:
        learn(budget, requests, [each])
        found += budget.limits(requests).tolist()
    assert found == windows


def test_each_request_has_its_own_window_until_it_leaves():
    budget, requests = AIMDBudget(), make_requests(3)
    assert budget.limits(requests).tolist() == [2, 2, 2]
    learn(budget, requests, [(2, 2), (2, 1), (2, 2)])
    learn(budget, requests, [(4, 4), (2, 2), (0, 0)])
    assert budget.limits(requests).tolist() == [6, 4, 4]
    budget.finish(requests[0])
    budget.finish(requests[0])  # again: nothing is known of it
    # SGLang's passes are told of when the next one is prepared: by then it has left, and says nothing of one with its
    # name.
    learn(budget, requests[:1], [(6, 6)])
    assert budget.limits(requests).tolist() == [2, 4, 4]


@pytest.mark.parametrize(
    ("most", "running", "skips"), [(None, 10_000, 0), (8, 7, 0), (8, 8, 0), (8, 9, 1), (1, 1, 0), (1, 2, 1)]
)
def test_drafts_are_off_above_the_batch_size(most, running, skips):
    assert AIMDBudget(max_batch_size=most).skips(running) == skips


def test_a_tree_is_hardly_ever_accepted_whole():
    budget, requests = AIMDBudget(start=3), make_requests(1)
    budget.limits(requests)
    drafts = DraftBatch.pack([chain(3)])
    tree = replace(drafts, parents=np.array([-1, 0, 0]))
    budget.learn(outcome_of(tree, np.array([True, True, False]), requests=requests))
    assert budget.limits(requests).tolist() == [3]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"nodes": 0}, "^nodes=0: expected at least 1"),
        ({"start": 0}, "^start=0: expected at least 1"),
        ({"increase": -1}, "^increase=-1: expected at least 0"),
        ({"max_batch_size": 0}, "^max_batch_size=0: expected at least 1, or null"),
    ],
)
def test_settings_out_of_range_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        AIMDBudget(**settings)
