"""What drafts brought in batches of a size decides in the next ones; who is asked for, and what a choice has lost."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rhymerl.budgets import GoodputBudget
from rhymerl.budgets.expectation import PassTotals
from rhymerl.budgets.outlook import Outlook
from rhymerl.budgets.probe_budget import ProbeBudget
from rhymerl.costs import CostCurve
from rhymerl.testing import make_requests
from tests.budgets.passes import guesses, passes

STRAIGHT = [(0, 1.0), (1000, 11.0)]  # a token costs a hundredth of a pass


def nodes_of_each(drafted, nodes):
    return drafted * nodes


def best(outlook: Outlook, rows: int, *, ask_cost=(0.0, 0.0), weights=None):
    return outlook.best(rows, CostCurve(STRAIGHT, ask_cost=ask_cost), weights=weights, computed=nodes_of_each)


def learned(**sizes: float) -> Outlook:
    """Each node up to the second is expected to be accepted so often, in batches of these sizes."""
    outlook = Outlook()
    for name, share in sizes.items():
        rows = int(name.removeprefix("of_"))
        for _ in range(60):
            outlook.learn(rows, np.concatenate([[0.0], np.cumsum(np.full(2 * rows, share))]), rows)
    return outlook


def test_each_size_of_batch_has_an_outlook_of_its_own_and_else_that_of_the_nearest():
    outlook = learned(of_64=0.9, of_2=0.01)
    # 64 rows: 1 + 2 * 0.9 tokens for 1 + 3 * 0.64 where 1 + 0.64 is plain, in hundredths.
    assert best(outlook, 64).gain == pytest.approx(2.8 * 1.64 / 2.92)
    assert best(outlook, 127) == best(learned(of_64=0.9), 127)
    assert best(outlook, 512).gain > 1
    assert best(outlook, 3).gain < 1.01
    assert best(Outlook(), 8).gain == 1.0


def test_who_is_asked_for_follows_from_what_asking_costs():
    """One request of 16 is worth half of all tokens."""
    outlook, weights = learned(of_16=0.8), np.array([*[8 / 15] * 15, 8.0])
    assert best(outlook, 16, weights=weights).num_asked == 16, "asking is free"
    assert best(outlook, 16, ask_cost=(0.0, 0.05), weights=weights).num_asked == 1
    assert best(outlook, 16, ask_cost=(0.0, 0.05), weights=weights).gain > 1.02
    assert best(outlook, 16, ask_cost=(2.0, 0.0), weights=weights).gain < 1


def test_where_later_steps_run_ahead_all_are_asked_for():
    """One request of 16 has half of all tokens, and drafting costs much; but its slot is not the last one at work."""
    requests = [replace(request, step=1) for request in make_requests(16)]
    budget = GoodputBudget(costs=STRAIGHT, ask_cost=(0.0, 0.05))
    budget._outlook, budget._kind, budget._rows = learned(of_16=0.8), "draft", 16
    for request in requests:
        budget.admit(request)
    worth = dict(zip([request.id for request in requests], [8.0, *[8 / 15] * 15], strict=True))
    generated, asked = np.ones(16, np.int64), []
    for running in (requests, [*requests[1:], replace(requests[0], step=2)], requests):
        budget.note_running(running, generated, num_waiting=0)
        budget._weights = worth
        asked.append(int(np.count_nonzero(budget.limits(running))))
        budget._course.batch = (0, False)
    assert asked == [1, 16, 16]


def test_a_probe_tells_how_much_better_drafts_have_become_beyond_its_own_nodes():
    outlook = learned(of_8=0.5)
    outlook.learn(8, np.array([0.0, 8.0]), 8, probed=1)
    once = outlook._tokens[3]
    # A first node that is always accepted instead of half the time: the second one counts twice as much, too. Three
    # tenths of it.
    assert once[2] == pytest.approx(0.7 * 0.5 + 0.3 * 1.0)
    assert once[3] == pytest.approx(0.7 * 1.0 + 0.3 * 2.0)


def test_a_step_begins_with_what_the_one_before_has_taught():
    """Each step has bad first passes, good ones, and a tail where drafts lose; one first probe does not pause them."""
    budget, asked = GoodputBudget(costs=[(0, 1.0), (64, 2.0), (256, 4.0)], ask_cost=(0.5, 0.01)), []
    for _ in range(8):
        parts = [(4, 64, 0.1), (30, 64, 0.9), (20, 3, 0.1)]
        found = [
            passes(
                budget,
                count,
                rows=rows,
                propose=guesses(4, share),
                is_right=lambda nodes, share=share: nodes * 0 + (share > 0.5),
            )
            for count, rows, share in parts
        ]
        asked.append([[count for count, _ in part] for part in found])
    good, tails = [each[1] for each in asked[3:]], [each[2] for each in asked[3:]]
    assert min(np.mean(np.array(part) == 64) for part in good) > 0.8
    assert max(np.mean(np.array(part) > 0) for part in tails) < 0.5


def test_a_smaller_batch_is_no_reason_to_look_where_nothing_was_ever_accepted():
    budget, looked = GoodputBudget(costs=STRAIGHT, ask_cost=(0.5, 0.05)), []
    for _ in range(12):
        for rows in (64, 31, 15):
            passes(budget, 40, rows=rows, propose=guesses(4, 0.1), is_right=lambda nodes: nodes < 0)
        report = budget.metrics()["budget/paused_frac"]
        looked.append(report.whole - report.part)
    assert sum(looked[4:]) <= 8 * 2, "an affordable probe, but no four passes for each size"


def test_a_small_debt_of_probes_spends_nothing_while_there_are_savings():
    assert not ProbeBudget(balance=-0.07, saved=28.0).is_spent
    assert ProbeBudget(balance=-0.07, saved=0.05).is_spent


def test_regret_is_what_the_best_choice_would_have_spared():
    totals, cost = PassTotals(), CostCurve(STRAIGHT)

    def begin(rows: int, passes: int) -> None:
        for _ in range(passes):
            totals.begun += 1
            totals.begin(0, rows)

    begin(10, 4)  # without drafts, where they would be 1.25 times as fast: a fifth of 4 passes of 1.1
    assert totals.regret(cost, lambda rows: 1.25) == pytest.approx(0.2)
    begin(100, 2)
    totals.count(100, made=1.0, taken=2.0)  # of the two one took twice as long for nothing: a third of 3 passes of 2
    begin(1000, 2)
    totals.count(
        1000, made=3.0, taken=2.0
    )  # 1.5 times as fast, but in one of two only: 1 - (4 / 3) / 1.5 of 3 passes of 11
    found = totals.regret(cost, lambda rows: 1.25)
    assert (found.part, found.whole) == (pytest.approx(0.2 * 4.4 + 2.0 + 33 / 9), pytest.approx(4.4 + 6.0 + 33.0))


def test_passes_for_which_the_budget_was_not_asked_are_of_the_batch_before():
    totals = PassTotals(begun=5)
    totals.begin(8, 3)
    assert {size: found.tolist()[:2] for size, found in totals.sizes.items()} == {4: [4, 32], 2: [1, 3]}
