"""The possible loss while drafts are looked for, and the loss that drafts that paid may make again."""

from __future__ import annotations

import numpy as np
import pytest

from rhymerl.budgets import GoodputBudget
from rhymerl.budgets.base import Pauses
from rhymerl.budgets.learned_cost import LearnedCost
from rhymerl.budgets.probe_budget import ProbeBudget
from tests.budgets.passes import guesses, passes


def test_a_probe_is_afforded_after_as_many_passes_as_are_said():
    """Whatever is missing, and whether or not drafts have saved something."""
    for saved in (0.0, 0.1, 5.0):
        for balance in (-3.0, 0.0, 0.9):
            budget = ProbeBudget(balance=balance, saved=saved, price=1.0)
            number = budget.passes_until_probe
            budget.earn(number - 1)
            assert not budget.affords_probe
            budget.earn(1)
            assert budget.affords_probe or budget.balance == pytest.approx(1.0)


def test_savings_make_probes_more_frequent_until_they_are_used_up():
    poor, rich = ProbeBudget(balance=0.0, saved=0.0, price=1.0), ProbeBudget(balance=0.0, saved=3.0, price=1.0)
    assert 4 * rich.passes_until_probe < poor.passes_until_probe
    probes = 0
    for _ in range(1000):
        rich.earn(1)
        if rich.affords_probe:
            rich.pay_probe(1.0)
            probes += 1
    assert rich.saved == pytest.approx(0.0)
    assert probes == 3 + 5, "what was saved, and the share of a thousand passes"


def test_drafts_lose_what_they_saved_before_they_stop():
    budget = ProbeBudget(balance=4.0, saved=0.0)
    budget.settle(10.0)
    assert (budget.balance, budget.saved) == (4.0, 10.0)
    budget.settle(-10.0)
    assert (budget.balance, budget.saved) == (4.0, 0.0)
    budget.settle(-4.5)
    assert budget.is_spent
    budget.settle(6.0)
    assert (budget.balance, budget.saved) == (4.0, 1.5)


def test_what_drafts_saved_long_ago_is_not_all_lost_again():
    budget = ProbeBudget()
    for _ in range(1000):
        budget.settle(1.0)
    lost = 0
    while not budget.is_spent:
        budget.settle(-1.0)
        lost += 1
    assert 10 < lost < 50


def test_probes_are_not_paid_from_savings_at_once():
    budget = ProbeBudget(balance=4.0, saved=30.0, price=1.0)
    for _ in range(4):
        budget.pay_probe(1.0)
    assert not budget.affords_probe


def test_paused_passes_are_counted_once_each_and_told_when_requests_enter_or_leave():
    told, asked = [], []

    def skips(num_requests: int) -> int:
        asked.append(num_requests)
        return 5

    pauses = Pauses(skips, told.append)
    assert all(pauses.take(3) for _ in range(7))
    assert (asked, told) == ([3, 3], [1, 5])
    pauses.end()  # a request enters
    assert told == [1, 5, 1]
    assert pauses.take(3)
    assert pauses.take(3)
    pauses.tell()  # one leaves
    assert told == [1, 5, 1, 1, 1]
    pauses.tell()
    assert sum(told) == 9


def test_the_first_pass_after_a_pause_teaches_no_cost():
    paused, never = LearnedCost(), LearnedCost()
    for number in range(60):
        asked = 8 * (number % 6 > 2)
        if number % 6 == 3:
            paused.note_pause()
            assert paused.observe(8, 8, 8, 9.0) == 9.0
        for cost in (paused, never):
            cost.observe(8, asked, asked, 1.0 + 0.5 * (asked > 0))
    nodes = np.array([0, 8])
    assert paused.seconds(8, nodes, 8).tolist() == never.seconds(8, nodes, 8).tolist()
    assert paused.seconds(8, nodes, 8)[1] == pytest.approx(1.5, rel=0.1)


def leaves(state: object) -> list[object]:
    if isinstance(state, dict):
        return leaves(list(state.values()))
    return [each for part in state for each in leaves(part)] if isinstance(state, list | tuple) else [state]


@pytest.mark.parametrize("num_passes", [3, 10, 200])
def test_the_state_has_plain_numbers_which_a_checkpoint_takes(num_passes):
    budget = GoodputBudget(8, costs=[(0, 1.0), (10, 2.0)])
    passes(budget, num_passes, rows=12, propose=guesses(4, 0.9), is_right=np.ones_like)
    assert {type(each) for each in leaves(budget.state_dict())} <= {int, float, bool, str, type(None)}
