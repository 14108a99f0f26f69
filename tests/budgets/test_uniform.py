"""The number of nodes of all requests in a pass, against trying all widths."""

from __future__ import annotations

import numpy as np
import pytest

from rhymerl.budgets import GoodputBudget, UniformGoodputBudget
from rhymerl.costs import CostCurve
from rhymerl.drafts import DraftBatch
from rhymerl.testing import make_requests
from tests.budgets.passes import chain, forest, outcome_of

WIDTHS = (0, 2, 4, 8, 16)
CHEAP = [[0, 1.0], [1000, 1.01]]
DEAR = [[0, 1e-6], [1000, 1.0]]


def budget_for(costs, requests, widths=WIDTHS):
    """Return a budget that drafts for the requests, as it does once drafts have paid."""
    budget = UniformGoodputBudget(widths, costs=costs)
    for request in requests:
        budget.admit(request)
    budget._course.drafts = True
    budget._course.trusted = 10**6
    budget.count_passes(1)
    assert budget.skips(len(requests)) == 0
    budget.note_running(requests, np.zeros(len(requests), np.int64), num_waiting=1)
    budget.limits(requests)
    return budget


@pytest.mark.parametrize("widths", [(), (2, 4), (0, 4, 2), (0, 2, 2)])
def test_widths_begin_with_none_and_rise(widths):
    with pytest.raises(ValueError, match=r"widths=\[.*\]: expected rising numbers of nodes, the first of them 0"):
        UniformGoodputBudget(widths)


@pytest.mark.parametrize(("largest", "width"), [(0, 0), (1, 2), (2, 2), (3, 4), (9, 16), (16, 16)])
def test_the_smallest_width_that_holds_a_draft(largest, width):
    assert UniformGoodputBudget(WIDTHS).width_of(largest) == width


@pytest.mark.parametrize("seed", range(20))
def test_no_other_width_makes_more_tokens_a_second(seed):
    """Also where few requests have drafts: all are computed as wide."""
    rng = np.random.default_rng(seed)
    steps = np.cumsum(rng.uniform(0, [60, 0.5], (4, 2)), axis=0)
    costs = [[0, 1.0], *([1 + tokens, 1.0 + seconds] for tokens, seconds in steps)]
    rows = int(rng.integers(1, 9))
    drafts, requests = forest(rng, rows, most=16), make_requests(rows)
    budget = budget_for(costs, requests)
    probability = budget._calibration * budget._acceptance.probabilities(drafts)
    mask = budget.trim(requests, drafts)

    def best_of(width):
        return [np.sort(probability[drafts.requests == r])[::-1][:width] for r in range(rows)]

    def goodput(width):
        added = sum(float(each.sum()) for each in best_of(width))
        return (rows + added) / float(CostCurve(costs).seconds(rows, rows * width, rows))

    counts = np.bincount(drafts.requests[mask], minlength=rows)
    chosen = budget.width_of(int(counts.max()))
    assert goodput(chosen) == pytest.approx(max(goodput(width) for width in WIDTHS))
    assert probability[mask].sum() == pytest.approx(sum(each.sum() for each in best_of(chosen)))


def test_dear_nodes_are_not_verified_and_cheap_ones_are():
    requests = make_requests(4)
    drafts = DraftBatch.pack([chain(9, 0.9)] * 4)
    assert not budget_for(DEAR, requests).trim(requests, drafts).any()
    assert budget_for(CHEAP, requests).trim(requests, drafts).all()


def test_one_long_draft_among_many_requests_does_not_pay_for_all():
    """If each node costs by itself, goodput takes the draft; here only one draft would gain from everybody's width."""
    costs = [[0, 1.0], [64, 1.0], [65, 1.2], [1000, 8.0]]
    requests = make_requests(32)
    drafts = DraftBatch.pack([chain(12, 0.95), *[chain(0)] * 31])
    free = GoodputBudget(16, costs=costs)
    free._course.drafts, free._course.trusted = True, 10**6
    free.skips(32)
    assert free.trim(requests, drafts).sum() == 12
    assert budget_for(costs, requests).trim(requests, drafts).sum() <= 2


def test_padding_is_paid_for():
    """What a pass is learned to cost is that of all it computes, and none of it counts as a prompt."""
    requests = make_requests(2)
    budget = budget_for(CHEAP, requests)
    drafts = DraftBatch.pack([chain(3), chain(0)])
    seen = []
    budget._cost.observe = lambda rows, nodes, asked, seconds, **more: seen.append((rows, nodes, more)) or seconds
    outcome = outcome_of(drafts, requests=requests)
    budget.trim(requests, drafts)
    budget.learn(type(outcome)(**{**vars_of(outcome), "num_padding": 5, "num_tokens": 10}))
    assert seen == [(2, 8, {"prompt_tokens": 0, "seen": 0})]


def test_a_pass_whose_time_is_not_known_teaches_acceptance_alone():
    requests = make_requests(2)
    budget = budget_for(None, requests)
    drafts = DraftBatch.pack([chain(2), chain(2)])
    budget.trim(requests, drafts)
    before, passes = budget._acceptance.probabilities(drafts).copy(), budget._cost.num_passes
    outcome = outcome_of(drafts, np.ones(4, np.bool_), requests=requests)
    budget.learn(type(outcome)(**{**vars_of(outcome), "seconds": None, "is_decoding": False}))
    assert budget._cost.num_passes == passes
    assert (budget._acceptance.probabilities(drafts) > before).all()


def vars_of(outcome):
    return {name: getattr(outcome, name) for name in type(outcome).__slots__}
