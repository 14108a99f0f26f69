"""Costs of passes, given and learned."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest

from rhymerl.budgets.learned_cost import LearnedCost
from rhymerl.costs import CostCurve, PassCost

EXPECTED = "expected at least two [tokens, seconds], tokens rising, seconds above 0 and not falling"


def seconds(cost: PassCost, rows: int, nodes: int, asked: int = 0) -> float:
    return float(cost.seconds(rows, np.array([nodes]), asked)[0])


# -- given -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "nodes", "cost"), [(1, 0, 1.0), (5, 0, 1.5), (1, 8, 2.0), (10, 9, 3.0), (10, 10, 4.0), (20, 10, 14.0)]
)
def test_a_curve_is_straight_between_and_beyond_its_points(rows, nodes, cost):
    curve = CostCurve([(1, 1), (9, 2), (19, 3), (20, 4)])
    assert seconds(curve, rows, nodes, asked=7) == pytest.approx(cost)
    curve.observe(rows, nodes, 7, 100.0)
    assert seconds(curve, rows, nodes) == pytest.approx(cost)


def test_a_curve_from_a_file(tmp_path):
    path = tmp_path / "costs.json"
    path.write_text(json.dumps({"costs": [[0, 1], [10, 2]], "device": "cpu"}))
    assert CostCurve.read(path).seconds(5, np.array([0, 5, 15]), 0).tolist() == [1.5, 2.0, 3.0]


@pytest.mark.parametrize(
    "points",
    [[], [[1, 1]], [[1, 1], [1, 2]], [[2, 1], [1, 2]], [[1, 2], [2, 1]], [[1, 0], [2, 1]], [[1, -1], [2, 1]], [1, 2],
     [[1, 1, 1], [2, 2, 2]], [["a", 1], [2, 2]], 5, [[1, None], [2, 2]], [[0, 1], [np.nan, 2]], [[0, 1], [np.inf, 2]],
     [[0, 1], [1, np.inf]]],
)  # fmt: skip
def test_curves_that_are_none_are_refused(points, tmp_path):
    with pytest.raises(ValueError, match=f"^{re.escape(f'points={points!r}: {EXPECTED}')}$"):
        CostCurve(points)
    path = tmp_path / "costs.json"
    path.write_text(json.dumps({"costs": points}))
    with pytest.raises(ValueError, match=rf"^costs='{path}': costs=.*: {re.escape(EXPECTED)}$"):
        CostCurve.read(path)


@pytest.mark.parametrize("content", [None, "", "{", "[]", "3", "{}", '{"cost": []}', "\xff"])
def test_files_that_are_none_are_refused(content, tmp_path):
    path = tmp_path / "costs.json"
    if content is not None:
        path.write_text(content, encoding="latin-1")
    start = f'costs={str(path)!r}: expected a JSON file {{"costs": [[tokens, seconds], ...]}} ('
    with pytest.raises(ValueError, match=rf"^{re.escape(start)}.*\)\Z"):  # in one line
        CostCurve.read(path)


# -- learned -----------------------------------------------------------------------------------------------------


def machine(constant: float, per_row: float, per_node: float, per_asked: float) -> dict[str, float]:
    return {"constant": constant, "per_row": per_row, "per_node": per_node, "per_asked": per_asked}


def truth(
    rows: int, nodes: int, asked: int, *, constant: float, per_row: float, per_node: float, per_asked: float
) -> float:
    return constant + per_row * rows + per_node * nodes + per_asked * asked


def watch(
    cost: LearnedCost, costs: dict[str, float], *, passes: int, rows: int = 128, budget: int = 32, seed: int = 0,
    slow: tuple[int, ...] = (), noise: float = 0.05, outliers: float = 0.02,
) -> None:  # fmt: skip
    """Passes over batches that shrink and grow; a sixth of them without drafts, some far too slow."""
    rng = np.random.default_rng(seed)
    for number in range(passes):
        now = int(rng.integers(rows // 4, rows + 1))
        asked = now if number % 30 < 25 else 0
        nodes = int(rng.integers(0, asked * budget + 1))
        taken = truth(now, nodes, asked, **costs) * (1 + noise * rng.standard_normal())
        if number in slow:
            taken *= 500
        elif rng.random() < outliers:
            taken *= 10
        cost.observe(now, nodes, asked, taken)


MACHINES = {
    "launches": machine(20e-3, 1e-4, 2e-5, 1e-5),
    "tokens": machine(5e-3, 1e-3, 1e-4, 2e-5),
    "drafter": machine(30e-3, 0, 1e-6, 3e-5),
}


def check(
    cost: LearnedCost, costs: dict[str, float], *, rows: int = 128, budget: int = 32, within: float = 0.1
) -> None:
    for now in (rows // 4, rows):
        for nodes in (0, now * budget // 4, now * budget):
            assert seconds(cost, now, nodes, now) == pytest.approx(truth(now, nodes, now, **costs), rel=within)


@pytest.mark.parametrize("costs", MACHINES.values(), ids=MACHINES)
@pytest.mark.parametrize("slow", [(), (0,), (0, 1, 2), (0, 5), (3,)])
def test_a_linear_cost_is_recovered(costs: dict[str, Any], slow):
    """The data have noise, outliers, and passes in which something was compiled."""
    cost = LearnedCost()
    watch(cost, costs, passes=300, slow=slow)
    check(cost, costs, within=0.12)  # a curve of twelve pieces is learned


def test_a_cost_that_is_not_straight_is_learned():
    """A real model's cost: 2 tokens take as long as 1, and 8 twice that; then it grows slowly. Prompts take part."""
    curve = CostCurve([(1, 30e-3), (2, 31e-3), (8, 64e-3), (32, 80e-3), (64, 110e-3), (256, 300e-3), (512, 640e-3)])
    cost, rng = LearnedCost(), np.random.default_rng(0)
    for number in range(600):
        rows = int(2 ** rng.uniform(0, 5.2))
        asked = rows if number % 15 < 8 else 0
        nodes, prompt_tokens = int(rng.integers(0, 6)) * asked, int(rng.integers(0, 300)) if number % 31 == 0 else 0
        taken = seconds(curve, rows, nodes + prompt_tokens) * (1 + 0.05 * rng.standard_normal())
        cost.observe(rows, nodes, asked, taken, prompt_tokens=prompt_tokens)
    for rows, nodes in ((1, 0), (2, 0), (8, 0), (32, 0), (1, 4), (4, 20), (30, 100)):
        assert seconds(cost, rows, nodes, rows if nodes else 0) == pytest.approx(seconds(curve, rows, nodes), rel=0.12)
    found = cost.seconds(30, np.zeros(1), 0, prompt_tokens=200)[0]
    assert found == pytest.approx(seconds(curve, 230, 0), rel=0.12)


def test_what_rows_see_is_learned():
    cost, rng = LearnedCost(), np.random.default_rng(0)
    for _ in range(300):
        seen = int(rng.integers(8, 8000))
        cost.observe(8, 0, 0, 1e-3 + 1e-6 * seen, seen=seen)
    for seen in (100, 4000):
        assert cost.seconds(8, np.zeros(1), 0, seen=np.array([seen]))[0] == pytest.approx(1e-3 + 1e-6 * seen, rel=0.1)


def test_dear_prompts_do_not_make_nodes_seem_dear():
    """Most of what is known of large passes is of prompts, as long as only probes have nodes."""
    cost, rng = LearnedCost(), np.random.default_rng(0)
    for number in range(600):
        nodes, asked = ((8, 8), (int(rng.integers(4, 40)), 8), *[(0, 0)] * 4)[number % 6]
        prompts = int(rng.choice([0, 0, 20, 100])) if number else 2000
        taken = 15e-3 + 35e-6 * nodes + 1e-3 * (asked > 0) + 1e-4 * asked
        taken += (5e-3 + 150e-6 * prompts) * (prompts > 0)
        cost.observe(128, nodes, asked, taken * rng.normal(1, 0.05), prompt_tokens=prompts)
    many = seconds(cost, 128, 1000, asked=8) - seconds(cost, 128, 0, asked=8)
    assert many < 2 * 35e-3
    after_prompts = cost.seconds(128, np.zeros(1), 0, prompt_tokens=100)[0] - seconds(cost, 128, 0)
    assert after_prompts == pytest.approx(20e-3, rel=0.3)


def test_many_passes_at_once_teach_what_they_do_one_by_one():
    rng = np.random.default_rng(0)
    rows, nodes = rng.integers(1, 60, 500), rng.integers(51, 100, 500)
    asked = np.where(np.arange(500) % 16 < 8, rows, 0)
    nodes, nothing = np.where(asked > 0, nodes, 0), np.zeros(500, np.int64)
    taken = (2e-3 + 3e-5 * (rows + nodes)) * (1 + 0.05 * rng.standard_normal(500))
    one_by_one, at_once = LearnedCost(), LearnedCost()
    for each in zip(rows.tolist(), nodes.tolist(), asked.tolist(), taken.tolist(), strict=True):
        one_by_one.observe(*each)
    for part in np.split(np.arange(500), 5):
        at_once.observe_all(
            rows[part], nodes[part], asked[part], taken[part], prompt_tokens=nothing[part], seen=nothing[part]
        )
    for now in (2, 10, 50):
        assert seconds(at_once, now, 0) == pytest.approx(seconds(one_by_one, now, 0), rel=0.02)
        assert seconds(at_once, now, 80, now) == pytest.approx(seconds(one_by_one, now, 80, now), rel=0.02)


@pytest.mark.parametrize("at_once", [False, True])
def test_the_first_passes_without_drafts_behind_drafts_teach_nothing(at_once):
    rows, asked = np.full(80, 8), np.tile([8] * 4 + [0] * 4, 10)
    found = []
    for cold in (1.0, 9.0):
        cost, taken = LearnedCost(), np.tile([1.5] * 4 + [cold, cold, 1.0, 1.0], 10)
        if at_once:
            nothing = np.zeros(80, np.int64)
            for part in np.split(np.arange(80), [30, 53]):  # some of these begin with passes behind drafts
                cost.observe_all(
                    rows[part], asked[part], asked[part], taken[part], prompt_tokens=nothing[part], seen=nothing[part]
                )
        else:
            for each in zip(rows.tolist(), asked.tolist(), asked.tolist(), taken.tolist(), strict=True):
                assert cost.observe(*each) == each[-1]
        found.append((cost.num_passes, seconds(cost, 8, 0), seconds(cost, 8, 8, 8)))
    assert found[0] == found[1] == (60, pytest.approx(1.0, rel=0.05), pytest.approx(1.5, rel=0.05))


def test_passes_whose_time_is_not_known_are_in_a_row_with_others():
    cost = LearnedCost()
    for taken in (2.0, None, 1.0):
        cost.observe(8, 0, 0, taken)
    assert cost.num_passes == 1
    before = seconds(cost, 8, 4, 8)
    assert cost.observe(8, 4, 8, None) == before == seconds(cost, 8, 4, 8)
    for taken in (2.0, 2.0, 1.0):
        cost.observe(8, 0, 0, taken)
    assert cost.num_passes == 2


def test_a_size_that_never_comes_twice_in_a_row_does_not_go_without_drafts_forever():
    cost, plain = LearnedCost(), []
    for number in range(3000):
        rows = 63 if number % 20 == 19 else 64
        is_plain = cost.wants_plain(rows)
        if rows == 63:
            plain.append(is_plain)
        asked = 0 if is_plain else rows
        cost.observe(rows, 4 * asked, asked, 1.0 + 0.2 * (asked > 0))
    assert any(plain[:10])
    assert sum(plain[50:]) < 10


def test_where_seconds_are_without_the_drafters_asking_costs_nothing():
    cost = LearnedCost(asking=False)
    for number in range(200):
        asked = 8 * (number % 10 < 5)
        assert seconds(cost, 8, 0, 8) == seconds(cost, 8, 0, 0)
        cost.observe(8, asked, asked, 1.0 + 0.5 * (asked > 0))
    assert seconds(cost, 8, 0, 8) == seconds(cost, 8, 0, 0) == pytest.approx(1.0, rel=0.05)


def test_a_large_batch_that_costs_what_a_small_one_does():
    """Squares of nodes are then 1e9 times that of the constant, which must not be rounded away."""
    cost, costs = LearnedCost(), machine(30e-3, 0, 0, 0)
    watch(cost, costs, passes=600, rows=512, budget=64, outliers=0)
    check(cost, costs, rows=512, budget=64)


def test_another_machine_is_learned_anew():
    """Slower by more than any outlier, from one pass to the next."""
    cost, costs = LearnedCost(), MACHINES["launches"]
    watch(cost, costs, passes=200)
    slower = {name: 8 * value for name, value in costs.items()}
    watch(cost, slower, passes=1500, seed=1)
    check(cost, slower)


@pytest.mark.parametrize("factor", [0.6, 1.6])
@pytest.mark.parametrize("asked_now", [0, 24], ids=["while drafting is paused", "while nearly all passes have drafts"])
def test_a_machine_that_changes_does_so_for_passes_with_drafts_and_without(factor, asked_now):
    """What is compared is one with the other: it must not matter which of them have been timed since."""
    cost, rng, costs = LearnedCost(), np.random.default_rng(0), MACHINES["tokens"]
    for number in range(900):
        late = number >= 300
        asked = 24 * (number % 10 < 5) if not late else 24 - asked_now if number % 60 < 3 else asked_now
        nodes = int(rng.integers(24, 97)) if asked else 0
        taken = truth(24, nodes, asked, **costs) * (1 + 0.05 * rng.standard_normal()) * (factor if late else 1.0)
        cost.observe(24, nodes, asked, taken)
    for nodes, asked in ((0, 0), (60, 24)):
        assert seconds(cost, 24, nodes, asked) == pytest.approx(factor * truth(24, nodes, asked, **costs), rel=0.2)


def test_the_pace_of_a_machine_that_stays_as_it_is_does_not_drift():
    """The more passes differ by chance, the further are their middle and their mean apart."""
    cost, rng = LearnedCost(), np.random.default_rng(0)
    for taken in 1e-2 * rng.lognormal(0.0, 0.3, 30_000):
        cost.observe(8, 0, 0, float(taken))
    assert 0.7 < cost._pace < 1.4


def test_nothing_is_paid_for():
    """Noise must not make a feature cost less than nothing."""
    rng, cost = np.random.default_rng(0), LearnedCost()
    for _ in range(400):
        cost.observe(8, int(rng.integers(0, 64)), 8, 1.0 + 0.3 * float(rng.random()))
        assert cost.seconds(1, np.array([0, 1, 100]), 0).tolist() == sorted(cost.seconds(1, np.array([0, 1, 100]), 0))
        assert seconds(cost, 1, 0) > 0


def test_what_would_be_paid_for_is_left_to_the_others():
    """Passes with many nodes take less here: nodes are then free, and the rest costs what a pass does on average."""
    cost, rng = LearnedCost(), np.random.default_rng(0)
    for _ in range(400):
        nodes = int(rng.integers(0, 65))
        cost.observe(8, nodes, 8, 2.0 - 0.01 * nodes)
    assert seconds(cost, 8, 0, 8) == pytest.approx(seconds(cost, 8, 64, 8), rel=1e-3) == pytest.approx(1.68, rel=0.03)


def test_before_the_first_pass_nodes_are_cheap():
    cost = LearnedCost()
    assert seconds(cost, 8, 32) < 1.5 * seconds(cost, 8, 0)


@pytest.mark.parametrize("taken", [0.0, 1e-12, 1e6])
def test_a_clock_that_stands_still_does_no_harm(taken):
    cost = LearnedCost()
    for _ in range(40):
        cost.observe(4, 3, 4, taken)
    assert 0 < seconds(cost, 4, 3, 4) == pytest.approx(max(taken, 1e-9), rel=0.1)
