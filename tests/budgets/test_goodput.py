"""The goodput budget against all sets there are, and when it leaves the drafter alone."""

from __future__ import annotations

import json

import numpy as np
import pytest

from rhymerl.budgets import GoodputBudget
from rhymerl.budgets.acceptance import Acceptance
from rhymerl.budgets.costs import CostCurve
from rhymerl.errors import ConfigError
from rhymerl.testing import make_requests
from rhymerl.types import DraftBatch
from tests.budgets.passes import chain, forest, outcome_of

CONVEX = {
    "flat, then steep": [(0, 1.0), (6, 1.1), (7, 2.0), (8, 4.0)],
    "straight": [(0, 1.0), (64, 2.0)],
    "dear": [(0, 0.5), (10, 8.0)],
    "steps": [(0, 1.0), (3, 1.0), (5, 1.5), (9, 3.5)],
}
DEAR = [(0, 1e-3), (1000, 1000.0)]  # a node costs what a token is worth, so none pays


@pytest.mark.parametrize("costs", CONVEX.values(), ids=CONVEX)
@pytest.mark.parametrize("scored", [True, False])
def test_no_ancestor_closed_set_is_better(costs, scored):
    rng, curve = np.random.default_rng(0), CostCurve(costs)
    budget, acceptance = GoodputBudget(costs=costs), Acceptance()
    sizes = set()
    for _ in range(25):
        rows = int(rng.integers(1, 4))
        drafts = forest(rng, rows, most=3, scored=scored)
        probabilities = acceptance.probabilities(drafts)

        def goodput(mask: np.ndarray) -> float:
            cost = float(curve.seconds(rows, np.array([mask.sum()]), rows)[0])  # noqa: B023
            return (rows + float(probabilities[mask].sum())) / cost  # noqa: B023

        num_nodes = len(probabilities)
        masks = [np.array([bits >> n & 1 for n in range(num_nodes)], np.bool_) for bits in range(2**num_nodes)]
        best = max(goodput(mask) for mask in masks if (drafts.closed(mask) == mask).all())
        chosen = budget.trim(make_requests(rows), drafts)
        assert (drafts.closed(chosen) == chosen).all()
        assert goodput(chosen) == pytest.approx(best, rel=1e-12)
        sizes.add(int(chosen.sum()))
        outcome = outcome_of(drafts, drafts.closed(rng.random(num_nodes) < 0.5))
        budget.learn(outcome)
        acceptance.learn(drafts, outcome.reached, outcome.accepted)
    assert len(sizes) > 1 or costs is CONVEX["dear"]


def test_nodes_without_scores_are_chosen_by_depth():
    """0.6, then 0.36: at a cost of 1 + n the second is worth less than the goodput that it would share."""
    drafts = DraftBatch.pack([chain(2, None), chain(2, None)])
    assert GoodputBudget(costs=[(1, 1.0), (2, 1.3), (100, 30.7)]).trim(make_requests(2), drafts).sum() in (0, 2)
    free = GoodputBudget(costs=[(0, 1.0), (100, 1.0)])
    assert free.trim(make_requests(2), drafts).all()


def test_scored_and_unscored_drafts_side_by_side():
    drafts = DraftBatch.pack([chain(3, 0.9), chain(3, None), chain(0), chain(2, 0.01)])
    chosen = GoodputBudget(costs=[(0, 1.0), (4, 1.0), (9, 1.4), (100, 100.0)]).trim(make_requests(4), drafts)
    assert chosen.tolist()[:4] == [True, True, True, True]
    assert not chosen[-2:].any()


def test_there_may_be_nothing_to_choose_from():
    budget = GoodputBudget(deterministic=True)
    drafts = DraftBatch.pack([chain(0)] * 3)
    assert budget.trim(make_requests(3), drafts).tolist() == []
    budget.learn(outcome_of(drafts))


# -- where costs come from ---------------------------------------------------------------------------------------


def test_costs_from_a_list_and_from_a_file_are_the_same(tmp_path):
    path = tmp_path / "costs.json"
    path.write_text(json.dumps({"costs": CONVEX["dear"]}))
    drafts = forest(np.random.default_rng(5), 6, most=8)
    listed, read, as_text = (GoodputBudget(costs=costs) for costs in (CONVEX["dear"], path, str(path)))
    masks = [each.trim(make_requests(6), drafts).tolist() for each in (listed, read, as_text)]
    assert masks[0] == masks[1] == masks[2]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"nodes": -1}, "budget.nodes=-1: expected at least 0"),
        ({"costs": "nothing.json"}, "budget.costs='nothing.json': expected a JSON file"),
        ({"costs": [[1, 2]]}, r"budget.costs=\[\[1, 2\]\]: expected at least two"),
    ],
)
def test_settings_out_of_range_are_named(settings, message):
    with pytest.raises(ConfigError, match=message):
        GoodputBudget(**settings)


def choices(budget: GoodputBudget, seconds: np.ndarray) -> list[list[bool]]:
    rng, chosen = np.random.default_rng(7), []
    for each in seconds.tolist():
        requests = make_requests(6)
        limits = budget.limits(requests)
        chosen.append(limits.tolist())
        if not limits.any():
            budget.learn(outcome_of(DraftBatch.pack([chain(0)] * 6), seconds=each))
            continue
        drafts = forest(rng, 6, most=8)
        mask = budget.trim(requests, drafts)
        chosen.append(mask.tolist())
        drafts = drafts.keep(mask)
        accepted = drafts.closed(rng.random(len(drafts.token_ids)) < 0.5)
        budget.learn(outcome_of(drafts, accepted, seconds=each))
    return chosen


def test_deterministic_never_depends_on_the_clock():
    clocks = np.random.default_rng(1).exponential(1.0, (2, 60)) ** 4
    assert choices(GoodputBudget(deterministic=True), clocks[0]) == choices(
        GoodputBudget(deterministic=True), clocks[1]
    )


@pytest.mark.parametrize(("per_node", "share"), [(1e-4, 1.0), (0.5, 0.0)])
def test_measured_costs_decide(per_node, share):
    """Cheap nodes are all verified in the end, dear ones not at all."""
    budget, rng, requests, kept = GoodputBudget(8), np.random.default_rng(0), make_requests(8), []
    for _ in range(300):
        if not budget.limits(requests).any():
            budget.learn(outcome_of(DraftBatch.pack([chain(0)] * 8), seconds=1.0))
            continue
        drafts = DraftBatch.pack([chain(length, 0.8) for length in rng.integers(0, 4, 8).tolist()])
        mask = budget.trim(requests, drafts)
        kept.append(mask.mean())
        drafts = drafts.keep(mask)
        accepted = drafts.closed(rng.random(len(drafts.token_ids)) < 0.8)
        budget.learn(outcome_of(drafts, accepted, seconds=1.0 + per_node * len(drafts.token_ids)))
    assert kept[-3:] == [share] * 3


# -- pauses ------------------------------------------------------------------------------------------------------


def asks(budget: GoodputBudget, rows: int, passes: int, *, score: float = 0.3) -> list[bool]:
    """In which of so many passes the drafter was asked; nothing it says is accepted."""
    requests, asked = make_requests(rows), []
    for _ in range(passes):
        limits = budget.limits(requests)
        asked.append(bool(limits.any()))
        if asked[-1]:
            drafts = DraftBatch.pack([chain(min(2, limit), score) for limit in limits.tolist()])
            drafts = drafts.keep(drafts.closed(budget.trim(requests, drafts)))
            budget.learn(outcome_of(drafts))
    return asked


def test_a_drafter_that_never_pays_is_hardly_ever_asked():
    asked = asks(GoodputBudget(costs=DEAR), 32, 2000)
    assert all(asked[:4])
    assert np.mean(asked[200:]) < 0.1
    assert any(asked[-70:])


def test_a_drafter_that_says_nothing_is_hardly_ever_asked():
    budget, requests, asked = GoodputBudget(deterministic=True), make_requests(4), 0
    for _ in range(1000):
        if budget.limits(requests).any():
            asked += 1
            budget.trim(requests, DraftBatch.pack([chain(0)] * 4))
    assert asked < 100


@pytest.mark.parametrize(("rows", "is_asked"), [(30, False), (26, False), (24, True), (1, True)])
def test_a_batch_that_has_shrunk_is_worth_another_look(rows, is_asked):
    budget = GoodputBudget(costs=DEAR)
    asked = asks(budget, 32, 400)
    while not asked[-1]:  # up to where a long pause begins
        asked += asks(budget, 32, 1)
    assert not any(asks(budget, 32, 10))
    assert asks(budget, rows, 1) == [is_asked]


def test_what_pays_again_is_asked_again():
    budget = GoodputBudget(costs=[(0, 1.0), (64, 1.2)])
    requests = make_requests(4)
    for _ in range(300):
        if budget.limits(requests).any():
            drafts = DraftBatch.pack([chain(1, 0.01)] * 4)
            drafts = drafts.keep(budget.trim(requests, drafts))
            budget.learn(outcome_of(drafts))
    asked = []
    for _ in range(200):
        asked.append(bool(budget.limits(requests).any()))
        if asked[-1]:
            drafts = DraftBatch.pack([chain(3, 0.99)] * 4)
            drafts = drafts.keep(budget.trim(requests, drafts))
            budget.learn(outcome_of(drafts, np.ones(len(drafts.token_ids))))
    assert all(asked[70:])


def test_a_try_is_small_and_grows_where_it_pays():
    budget, requests = GoodputBudget(32, costs=[(0, 1.0), (1000, 1.001)]), make_requests(2)
    limits = []
    for _ in range(6):
        limits.append(int(budget.limits(requests).max()))
        drafts = DraftBatch.pack([chain(limits[-1], 0.99)] * 2)
        budget.trim(requests, drafts)
        budget.learn(outcome_of(drafts, np.ones(len(drafts.token_ids))))
    assert limits[0] == 4
    assert limits[-1] == 32
    assert limits == sorted(limits)


def test_metrics_are_of_what_has_been_since():
    budget, requests = GoodputBudget(8, costs=[(0, 1.0), (10, 1.0), (20, 2.0)]), make_requests(2)
    assert budget.max_nodes == 8
    assert budget.limits(requests).tolist() == [4, 4]
    drafts = DraftBatch.pack([chain(2, 0.9), chain(1, 0.9)])
    assert budget.trim(requests, drafts).all()
    budget.learn(outcome_of(drafts))
    expected = (2 + Acceptance().probabilities(drafts).sum()) / 2
    assert budget.metrics() == {
        "budget/nodes_per_pass": 3.0,
        "budget/paused_frac": 0.0,
        "budget/expected_speedup": pytest.approx(expected),
        "budget/node_cost_frac": 0.0,
    }
    assert budget.metrics()["budget/nodes_per_pass"] == 0.0
    assert budget.metrics()["budget/expected_speedup"] == 1.0


def test_a_resumed_budget_goes_on_as_the_whole_one_does():
    """Through plain containers, as a checkpoint holds them."""
    requests, drafts = make_requests(3), DraftBatch.pack([chain(4, 0.9), chain(3, 0.7), chain(2, 0.3)])
    costs = [(0, 1.0), (10, 2.0)]
    whole = GoodputBudget(8, costs=costs)
    for _ in range(20):
        whole.limits(requests)
        whole.learn(outcome_of(drafts.keep(whole.trim(requests, drafts))))
    fresh, resumed = GoodputBudget(8, costs=costs), GoodputBudget(8, costs=costs)
    assert fresh.trim(requests, drafts).sum() != whole.trim(requests, drafts).sum(), "nothing was learned"
    resumed.load_state_dict(json.loads(json.dumps(whole.state_dict())))
    for _ in range(80):
        np.testing.assert_array_equal(resumed.limits(requests), whole.limits(requests))
        np.testing.assert_array_equal(resumed.trim(requests, drafts), whole.trim(requests, drafts))


def test_now_and_then_a_pass_goes_without_drafts_although_they_pay():
    """Without such passes nobody would know what drafts are compared with: here a pass with any costs 1.5, one without 1."""
    budget, requests = GoodputBudget(8), make_requests(8)
    asked = []
    for _ in range(400):
        asked.append(bool(budget.limits(requests).any()))
        drafts = DraftBatch.pack([chain(4, 0.99)] * 8 if asked[-1] else [chain(0, 1.0)] * 8)
        if asked[-1]:
            drafts = drafts.keep(budget.trim(requests, drafts))
        nodes = len(drafts.token_ids)
        seconds = 1.5 + 0.001 * nodes if asked[-1] else 1.0
        budget.learn(outcome_of(drafts, np.ones(nodes), seconds=seconds))
    assert not asked[4]  # early: its cost is what the first comparisons need
    assert 4 <= asked.count(False) <= 20
    assert budget._cost.seconds(8, np.zeros(1, np.int64), 0)[0] == pytest.approx(1.0, rel=0.05)


def test_broken_promises_are_remembered_and_fade():
    budget, requests = GoodputBudget(8, costs=[(0, 1.0), (1000, 1.001)]), make_requests(4)
    for _ in range(60):
        budget.limits(requests)
        drafts = DraftBatch.pack([chain(3, 0.9)] * 4)
        budget.trim(requests, drafts)
        budget._acceptance = Acceptance()  # calibration that never learns
        budget.learn(outcome_of(drafts, np.zeros(12)))
    before = budget._honesty
    assert before < 0.3
    budget._look_again()
    assert before < budget._honesty < 1
