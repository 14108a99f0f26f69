"""The goodput budget against all sets there are, where its costs come from, and what it keeps and says."""

from __future__ import annotations

import json

import numpy as np
import pytest

from rhymerl.budgets import GoodputBudget
from rhymerl.budgets.acceptance import Acceptance
from rhymerl.costs import CostCurve
from rhymerl.drafts import DraftBatch, closed
from rhymerl.testing import make_requests
from tests.budgets.passes import chain, forest, guesses, outcome_of, passes

CONVEX = {
    "flat, then steep": [(0, 1.0), (6, 1.1), (7, 2.0), (8, 4.0)],
    "straight": [(0, 1.0), (64, 2.0)],
    "dear": [(0, 0.5), (10, 8.0)],
    "steps": [(0, 1.0), (3, 1.0), (5, 1.5), (9, 3.5)],
}


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
        best = max(goodput(mask) for mask in masks if (closed(drafts, mask) == mask).all())
        chosen = budget.trim(make_requests(rows), drafts)
        assert (closed(drafts, chosen) == chosen).all()
        assert goodput(chosen) == pytest.approx(best, rel=1e-12)
        sizes.add(int(chosen.sum()))
        outcome = outcome_of(drafts, closed(drafts, rng.random(num_nodes) < 0.5))
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
        ({"nodes": -1}, "^nodes=-1: expected at least 0"),
        ({"costs": "nothing.json"}, "^costs='nothing.json': expected a JSON file"),
        ({"costs": [[1, 2]]}, r"^costs=\[\[1, 2\]\]: expected at least two"),
        ({"costs": [[1, 2], [2, 3]], "ask_cost": [0, -1]}, r"^ask_cost=\[0, -1\]: expected two costs"),
        ({"costs": [[1, 2], [2, 3]], "ask_cost": [1]}, r"^ask_cost=\[1\]: expected two costs"),
        ({"ask_cost": [0, 0.5]}, r"^ask_cost=\[0, 0\.5\]: expected \[0, 0\] without costs"),
    ],
)
def test_settings_out_of_range_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        GoodputBudget(**settings)


def test_deterministic_never_depends_on_the_clock():
    def choices(seed: int) -> list[tuple[int, int]]:
        clock, luck = np.random.default_rng(seed), np.random.default_rng(7)
        return passes(
            GoodputBudget(deterministic=True),
            300,
            rows=6,
            propose=lambda limits: [chain(int(luck.integers(0, limit + 1)), 0.8) for limit in limits],
            is_right=lambda nodes: luck.random(len(nodes)) < 0.7,
            seconds=lambda nodes, asked: float(clock.exponential(1.0) ** 4),
        )

    assert choices(1) == choices(2)
    assert any(nodes for _, nodes in choices(1))


@pytest.mark.parametrize(("ask_cost", "are_verified"), [((0, 0), True), ((0, 0.5), False), ((4, 0), False)])
def test_what_asking_costs_decides_where_costs_are_given(ask_cost, are_verified):
    budget = GoodputBudget(8, costs=[(1, 1.0), (100, 2.0)], ask_cost=ask_cost, deterministic=True)
    found = passes(budget, 300, rows=8, propose=guesses(3, 0.9), is_right=np.ones_like)
    assert (np.mean([asked == 8 for asked, _ in found]) > 0.5) == are_verified
    assert budget.metrics()["budget/ask_cost_frac"] == pytest.approx(sum(ask_cost))


@pytest.mark.parametrize(("per_node", "are_verified"), [(1e-4, True), (0.5, False)])
def test_measured_costs_decide(per_node, are_verified):
    """Cheap nodes are all verified in the end, dear ones only to see whether they still are."""
    luck = np.random.default_rng(0)
    found = passes(
        GoodputBudget(8),
        600,
        rows=8,
        propose=guesses(3, 0.8),
        is_right=lambda nodes: luck.random(len(nodes)) < 0.8,
        seconds=lambda nodes, asked: 1.0 + per_node * nodes,
    )
    nodes = [nodes for _, nodes in found[300:]]
    if are_verified:
        assert nodes.count(24) > 0.9 * len(nodes)
    else:
        assert np.mean(nodes) < 0.2


def test_metrics_are_of_what_has_been_since():
    budget, requests = GoodputBudget(8, costs=[(0, 1.0), (10, 1.0), (20, 2.0)]), make_requests(2)
    assert budget.max_nodes == 8
    for request in requests:
        budget.admit(request)
    budget.count_passes(1)
    assert not budget.skips(2)
    assert budget.limits(requests).tolist() == [8, 8]
    drafts = DraftBatch.pack([chain(2, 0.9), chain(1, 0.9)])
    assert budget.trim(requests, drafts).all()
    budget.learn(outcome_of(drafts, np.ones(3)))
    # Without drafts the requests would have taken 3 and 2 passes, each at a cost of 1; they took one, at 1 for its 5
    # tokens.
    assert budget.metrics() == {
        "budget/nodes_per_pass": 3.0,
        "budget/paused_frac": 0.0,
        "budget/regret": 0.0,
        "budget/expected_speedup": pytest.approx(3.0),
        "budget/node_cost_frac": 0.0,
        "budget/ask_cost_frac": 0.0,
        "budget/ask_more_cost_frac": 0.0,
    }
    assert budget.metrics()["budget/nodes_per_pass"] == 0.0
    assert budget.metrics()["budget/expected_speedup"] == 1.0


def test_a_resumed_budget_goes_on_as_the_whole_one_does():
    """Its state goes through plain containers, as in a checkpoint; while drafts pay, and when they no longer do."""
    costs, luck = [(0, 1.0), (10, 2.0)], np.random.default_rng(0)
    whole = GoodputBudget(8, costs=costs)
    passes(whole, 200, rows=12, propose=guesses(4, 0.9), is_right=lambda nodes: luck.random(len(nodes)) < 0.9)
    fresh, resumed = GoodputBudget(8, costs=costs), GoodputBudget(8, costs=costs)
    resumed.load_state_dict(json.loads(json.dumps(whole.state_dict())))
    runs = []
    for budget in (whole, resumed, fresh):
        luck = np.random.default_rng(1)
        is_right = lambda nodes: luck.random(len(nodes)) < 0.9  # noqa: B023, E731
        runs.append(passes(budget, 200, rows=12, propose=guesses(4, 0.9), is_right=is_right))
        runs[-1] += passes(budget, 400, rows=12, propose=guesses(4, 0.9))
    assert runs[0] == runs[1]
    assert runs[0] != runs[2], "nothing was learned"


def test_now_and_then_a_pass_goes_without_drafts_although_they_pay():
    """Without such passes drafts have no baseline: here a pass with any costs 1.5, one without 1."""
    budget = GoodputBudget(8)
    seconds = lambda nodes, asked: 1.5 + 0.001 * nodes if asked else 1.0  # noqa: E731
    found = passes(budget, 400, rows=8, propose=guesses(4, 0.99), is_right=np.ones_like, seconds=seconds)
    assert 4 <= [asked for asked, _ in found].count(0) <= 24  # three in a row, of which the third one counts
    assert budget._cost.seconds(8, np.zeros(1, np.int64), 0)[0] == pytest.approx(1.0, rel=0.05)


def test_a_pass_right_behind_drafts_is_no_baseline():
    """The model is not in the caches then: it takes 1.6 instead of 1, which drafts that take 1.5 would seem to beat."""
    budget, taken = GoodputBudget(8), []

    def seconds(nodes, asked):
        taken.append(asked)
        return 1.5 if asked else 1.6 if any(taken[-3:]) else 1.0

    passes(budget, 400, rows=8, propose=guesses(4, 0.99), is_right=np.ones_like, seconds=seconds)
    assert budget._cost.seconds(8, np.zeros(1, np.int64), 0)[0] == pytest.approx(1.0, rel=0.05)


def test_broken_promises_are_remembered_and_fade():
    budget, requests = GoodputBudget(8, costs=[(0, 1.0), (1000, 1.001)]), make_requests(4)
    for _ in range(60):
        drafts = DraftBatch.pack([chain(3, 0.9)] * 4)
        budget.trim(requests, drafts)
        budget._acceptance = Acceptance()  # calibration that never learns
        budget.learn(outcome_of(drafts, np.zeros(12)))
    before = budget._calibration
    assert before < 0.3
    budget._kind, budget._rows = "probe", 4
    for _ in range(10):
        drafts = DraftBatch.pack([chain(1, 0.5)] * 4)
        budget.trim(requests, drafts)
        budget.learn(outcome_of(drafts, np.ones(4)))
    assert before < 0.6 < budget._calibration
