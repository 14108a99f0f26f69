"""The tasks of several turns: what is replied, what counts."""

from __future__ import annotations

import random

import pytest

from rhymerl.environments.base import Turn
from rhymerl.environments.calls import read_calls
from rhymerl.environments.ready import calculator
from rhymerl.tasks import Calculation, CheckedSum
from rhymerl.tasks.calculation import calculation_reward
from rhymerl.tasks.checked_sum import checked_sum_reward

ROW = {"prompt": "37+85+12=?\n", "answer": "134"}


@pytest.mark.parametrize(
    ("said", "replies"),
    [
        (["37+85=122;122+12=134;#134"], [None]),
        (["37+85=122;122+12=133;#133", "134;#134"], ["?122+12=", None]),
        (["37+85=121;121+12=133;#133", "122;122+12=134;#134"], ["?37+85=", None]),
        (["37+85=122;122+12=134;#135", "134"], ["?#", None]),
        (["37+85=122;122+12=134;#1345", "134"], ["?#", None]),
        (["37+85=122;122+12=134;", "134"], ["?122+12=", "?122+12="]),
        (["", "38+85=1", "37+85=122;122+12=134;#134"], ["?", "?", None]),
        (["37+85=122;123+12=", "9", "122;122+12=134;#134"], ["?37+85=", "?37+85=", None]),
    ],
)
def test_a_checked_sum_is_asked_for_from_its_first_wrong_step(said, replies):
    turns = [Turn(text=text) for text in said]
    assert [CheckedSum().reply(ROW, turns[: number + 1]) for number in range(len(turns))] == replies


def test_each_turn_more_halves_the_reward():
    turns = [{"text": "x", "reply": "?"}] * 3
    rewards = [checked_sum_reward("", finish_reason="stop", turns=turns[:count]) for count in (1, 2, 3)]
    assert rewards == [1.0, 0.5, 0.25]
    assert checked_sum_reward("", finish_reason="max_turns", turns=turns) == 0.0


def test_what_is_shown_of_a_calculation_is_what_its_tool_does():
    task = Calculation(max_terms=4)
    row = task.problem(random.Random(3))
    first, reply, last = task.demonstration(row, random.Random(0))
    (call,) = read_calls(first["content"], "hermes")
    assert call.name == calculator.__name__
    assert calculator(**call.arguments) == reply["content"] == row["answer"]
    assert calculation_reward("", turns=[{"text": last["content"]}], answer=row["answer"]) == 1.0


def test_a_calculators_result_that_is_not_said_counts_for_nothing():
    turns = [{"text": "<tool_call>…</tool_call>", "reply": "134"}, {"text": "Thanks."}]
    assert calculation_reward("134 Thanks.", turns=turns, answer="134") == 0.0
