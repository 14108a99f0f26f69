"""The rule by which run_ahead=auto begins the next step, or does not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rhymerl.drafts import NOT_DRAFTED, DraftSource
from rhymerl.schedulers import FIFOScheduler
from rhymerl.testing import make_requests
from rhymerl.types import Completion, Output, Sample
from rhymerl.workers.run_ahead_rules import DraftWherePays, RunAheadRule, rule_of, share_ahead


def begun(rule: RunAheadRule, shares: list[float | None]) -> list[bool]:
    """Whether each of the following steps is begun ahead, where a step that was begun so has that share."""
    found = []
    for share in shares:
        found.append(rule.begins())
        rule.note(share)
    return found


def test_steps_are_begun_ahead_while_that_brings_tokens():
    assert begun(DraftWherePays(), [0.0, 0.5, 0.02, 0.3]) == [True] * 4


def test_where_it_brings_none_every_eighth_step_looks_again():
    # The share of step 1 is the first of one that was begun ahead. Step 2 had begun by then.
    assert begun(DraftWherePays(), [0.0] * 20) == [True, True, *[False] * 7, True, *[False] * 7, True, False, False]


def test_one_look_is_enough_to_begin_again():
    shares = [0.0] * 10 + [0.4] * 5
    assert begun(DraftWherePays(), shares)[-6:] == [True, False, True, True, True, True]


def test_an_engine_that_does_not_tell_is_believed():
    assert begun(DraftWherePays(), [None] * 12) == [True] * 12


def test_a_rule_goes_on_from_its_state():
    shares = [0.0] * 30
    whole, first = DraftWherePays(), DraftWherePays()
    expected = begun(whole, shares)
    found = begun(first, shares[:7])
    second = DraftWherePays()
    second.load_state_dict(first.state_dict())
    assert found + begun(second, shares[7:]) == expected


@pytest.mark.parametrize(
    ("sources", "share"),
    [
        ([[DraftSource.RUN_AHEAD, NOT_DRAFTED], [DraftSource.RUN_AHEAD, DraftSource.HISTORY + 2]], 0.5),
        ([[NOT_DRAFTED], None], 0.0),
        ([None, None], None),
    ],
)
def test_the_share_is_of_tokens_that_came_from_run_ahead(sources, share):
    samples = [
        Sample(
            completion=Completion(request=request, output=output(each)),
            text="",
            reward=0.0,
            rewards={},
            loss_mask=np.ones(2, np.bool_),
        )
        for request, each in zip(make_requests(len(sources), max_tokens=4), sources, strict=True)
    ]
    assert share_ahead(samples) == share


@pytest.mark.parametrize("mode", ["off", "draft", "keep"])
def test_the_other_modes_know_beforehand(mode):
    rule = rule_of(mode)
    assert begun(rule, [0.0] * 9) == [mode != "off"] * 9
    assert (rule.mode, rule.state_dict()) == (mode, {})
    scheduler = FIFOScheduler()
    assert rule.planner(scheduler) is scheduler


def output(sources: list[int] | None) -> Output:
    length = 2 if sources is None else len(sources)
    output = Output.of(np.zeros(length), finish_reason="stop")
    return output if sources is None else replace(output, sources=np.array(sources, np.int8))
