"""The goodput budget where drafts do not pay, or not always: how it finds out, and what that costs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rhymerl.budgets import GoodputBudget
from rhymerl.drafts import DraftBatch
from rhymerl.testing import make_requests
from tests.budgets.passes import chain, guesses, outcome_of, passes
from tests.products import values_first

DEAR = [(0, 1e-3), (1000, 1000.0)]  # a node costs what a token is worth, so none pays


@pytest.mark.parametrize(
    ("rows", "costs"),
    values_first([8, 1, 64, 256], [(0.01, 0.0), (0.0, 0.02), (0.05, 0.05), (1.0, 0.0), (1e-4, 1e-3)]),
)
def test_a_drafter_that_never_pays_costs_a_hundredth(rows, costs):
    """Whatever asking and verifying cost: after the first tries the time lost is a share of all passes."""
    lost, (per_asked, per_node) = [], costs

    def seconds(nodes: int, asked: int) -> float:
        lost.append(per_asked * asked + per_node * nodes)
        return 1.0 + lost[-1]

    budget = GoodputBudget()
    passes(budget, 4000, rows=rows, propose=guesses(4, 0.9), seconds=seconds)
    early = sum(lost)
    lost.clear()
    asked = passes(budget, 4000, rows=rows, propose=guesses(4, 0.9), seconds=seconds)
    assert sum(lost) < 0.02 * 4000
    assert any(count for count, _ in asked), "it is still asked now and then"
    assert early < 0.02 * 4000 + 3 * max(1.0, per_asked * rows + per_node * 4 * rows)


def test_a_drafter_that_says_nothing_is_hardly_ever_asked():
    found = passes(GoodputBudget(), 2000, rows=4, propose=guesses(0), seconds=lambda nodes, asked: 1 + 0.1 * asked)
    assert 0 < sum(asked > 0 for asked, _ in found) < 100


@pytest.mark.parametrize(
    ("rows", "scores"), values_first([1, 16, 64], {"unannounced": (0.9, 0.9), "announced": (0.02, 0.98)})
)
def test_drafts_that_begin_to_pay_are_found(rows, scores):
    """Useless for a long while, then all of them right: within some hundred passes all requests are drafted for."""
    budget = GoodputBudget()
    seconds = lambda nodes, asked: 1.0 + 0.002 * asked + 0.005 * nodes  # noqa: E731
    useless = passes(budget, 3000, rows=rows, propose=guesses(4, scores[0]), seconds=seconds)
    assert np.mean([asked for asked, _ in useless[1000:]]) < 0.1 * rows + 1
    rhyming = passes(budget, 1200, rows=rows, propose=guesses(8, scores[1]), is_right=np.ones_like, seconds=seconds)
    assert sum(asked == rows for asked, _ in rhyming[600:]) > 0.9 * 600


def test_costs_that_are_not_straight_do_not_hide_a_loss():
    """Small passes cost less than a line through larger ones says, so that drafts seem to pay but lose."""
    luck, budget = np.random.default_rng(0), GoodputBudget()
    lost = total = 0.0
    for step in range(60):
        for rows, plain in ((64, 2.6), (32, 2.2), (8, 1.5), (2, 1.0)):

            def seconds(nodes: int, asked: int, plain: float = plain) -> float:
                return plain + 0.003 * asked + 0.01 * nodes + 0.75 * (asked > 0)

            found = passes(
                budget,
                12,
                rows=rows,
                propose=guesses(3, 0.6),
                is_right=lambda nodes: luck.random(len(nodes)) < 0.4,
                seconds=seconds,
            )
            if step >= 10:
                total += 12 * plain
                lost += sum(
                    seconds(nodes, asked) - plain * (1 + 0.62 * min(nodes / rows / 3, 1)) for asked, nodes in found
                )
    assert lost < 0.03 * total


def test_what_pays_in_a_small_batch_only_is_drafted_for_there_at_once():
    """Nodes cost what they bring with 64 requests, and next to nothing with 4; each step begins full and ends thin."""
    curve = [(0, 1.0), (16, 1.02), (64, 1.4), (512, 12.0)]
    budget, asked = GoodputBudget(costs=curve), {64: [], 4: []}
    for _ in range(12):
        for rows in (64, 4):
            found = passes(budget, 30, rows=rows, propose=guesses(3, 0.9), is_right=np.ones_like)
            asked[rows].append([count for count, _ in found])
    assert np.mean([count == 4 for step in asked[4][4:] for count in step]) > 0.9
    assert np.mean([count > 8 for step in asked[64][4:] for count in step]) < 0.3


def test_a_probe_asks_for_few_requests_and_others_each_time():
    budget, requests, asked = GoodputBudget(costs=DEAR), make_requests(40), []
    while len(asked) < 5:
        if not budget.skips(40) and (limits := budget.limits(requests)).any():
            asked.append(set(np.flatnonzero(limits).tolist()))
            budget.learn(outcome_of(DraftBatch.pack([chain(0)] * 40), requests=requests))
    assert [len(each) for each in asked] == [8] * 5
    assert len(set.union(*asked)) == 40


def test_prefetched_tokens_are_tried_at_once():
    """A request that has some is asked first, however little drafts have paid lately."""
    budget, requests = GoodputBudget(costs=DEAR), make_requests(40)
    passes(budget, 500, rows=40, propose=guesses(2))
    requests[33] = replace(requests[33], prefetched=np.array([5, 6], np.int32))
    budget.admit(requests[33])
    assert not budget.skips(40)
    assert budget.limits(requests)[33] > 0


def test_a_probe_sees_where_only_long_drafts_pay():
    """Asking takes as long as five passes: four nodes do not make up for that, sixteen do."""
    budget = GoodputBudget(32, costs=[(0, 1.0), (1000, 1.001)], ask_cost=(5, 0), deterministic=True)
    found = passes(budget, 600, rows=16, propose=guesses(32, 0.99), is_right=np.ones_like)
    assert np.mean([asked == 16 for asked, _ in found[300:]]) > 0.9


def test_what_drafts_save_counts_where_prompts_are_computed_too():
    budget, requests = GoodputBudget(8, costs=[(0, 1.0), (1000, 1.001)]), make_requests(8)
    drafts = DraftBatch.pack([chain(4, 0.99)] * 8)
    saved = budget._probe_budget.saved
    for _ in range(4):
        assert not budget.skips(8)
        budget.limits(requests)
        outcome = outcome_of(drafts, budget.trim(requests, drafts), requests=requests)
        budget.learn(replace(outcome, num_tokens=outcome.num_tokens + 5, is_decoding=False))
    assert budget._probe_budget.saved > saved + 4


def test_a_try_is_small_and_grows_where_it_pays():
    budget, requests = GoodputBudget(32, costs=[(0, 1.0), (1000, 1.001)]), make_requests(2)
    limits = []
    for _ in range(6):
        assert not budget.skips(2)
        limits.append(int(budget.limits(requests).max()))
        drafts = DraftBatch.pack([chain(limits[-1], 0.99)] * 2)
        budget.trim(requests, drafts)
        budget.learn(outcome_of(drafts, np.ones(len(drafts.token_ids))))
    assert limits[0] == 16
    assert limits[-1] == 32
    assert limits == sorted(limits)


def test_far_more_nodes_than_ever_are_not_verified_at_once():
    """The cost of such a pass is unknown, so it is explored in steps, even if all that is known says nodes are free."""
    budget = GoodputBudget(32, costs=[(0, 1.0), (100_000, 1.001)])
    found = passes(budget, 40, rows=64, propose=guesses(32, 0.99), is_right=np.ones_like)
    nodes = [number for _, number in found]
    assert all(number <= max(128, 4 * max(nodes[:index], default=0)) for index, number in enumerate(nodes))
    assert nodes[-1] == 64 * 32
