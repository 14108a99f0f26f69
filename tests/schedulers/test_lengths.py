"""Predicted lengths: by hand, with answers that were cut off, and within bounded memory."""

from __future__ import annotations

import numpy as np
import pytest

from rhymerl.schedulers import LengthPredictor
from rhymerl.schedulers.queue_cost import QueueCost
from tests.schedulers.answers import answered, requests_for, samples_for

FIRST, SECOND = requests_for(2)


def predicted(lengths: LengthPredictor, request=FIRST) -> tuple[float, float, bool]:
    found = lengths.predict(request)
    return found.median, found.tail, found.is_known


def test_median_and_tail_move_by_half_a_group():
    lengths = LengthPredictor()
    lengths.learn(samples_for([[10, 40, 20, 30]]))
    assert predicted(lengths) == (25, 40, True)
    lengths.learn(samples_for([[30, 50, 80]]))
    assert predicted(lengths) == (25 / 2 + 50 / 2, 40 / 2 + 80 / 2, True)


def test_the_tail_is_a_quantile_of_large_groups():
    lengths = LengthPredictor(tail=0.9)
    lengths.learn(samples_for([list(range(1, 41))]))
    assert predicted(lengths) == (20.5, 36, True)


def test_before_anything_is_known_the_limit_is_expected():
    assert predicted(LengthPredictor()) == (1000, 1000, False)


def test_an_unknown_prompt_is_expected_at_the_upper_quantile_of_all():
    lengths = LengthPredictor(tail=0.75)
    lengths.learn(samples_for([[10, 20, 30, 40]]))
    assert predicted(lengths, SECOND) == (30, 30, False)
    assert predicted(lengths, requests_for(2, max_tokens=25)[1]) == (25, 25, False)


def test_cut_answers_are_at_least_so_long():
    lengths = LengthPredictor()
    lengths.learn(samples_for([[100, 200, 300, 1000]]))
    assert predicted(lengths) == (250, 1000, True)
    # The limit has been raised: the tail was "at least 1000", the median is what it was.
    longer = requests_for(1, max_tokens=4000)[0]
    assert predicted(lengths, longer) == (250, 4000, True)
    # Most answers are cut: the median too is "at least", and reaches any limit.
    lengths.learn(samples_for([[100, 1000, 1000, 1000]]))
    assert predicted(lengths) == (1000, 1000, True)
    assert predicted(lengths, longer) == (4000, 4000, True)


def test_a_lower_limit_does_not_pull_an_estimate_down():
    lengths, request = LengthPredictor(), FIRST
    lengths.learn([answered(request, 800)])
    lengths.learn([answered(request, 300, "length")])
    assert lengths.predict(requests_for(1, max_tokens=600)[0]).median == 600
    lengths.learn([answered(request, 400)])  # whole again: 800 and 400
    assert lengths.predict(request).median == 600


def test_errors_are_those_of_what_had_been_predicted():
    lengths = LengthPredictor()
    lengths.learn(samples_for([[10, 20]]))
    assert lengths.metrics() == {}  # nothing had been predicted
    lengths.learn(samples_for([[12, 21]]))  # 15 was
    assert lengths.metrics() == {"sched/length_pred_mae": 4.5}
    assert lengths.metrics() == {}
    lengths.learn([answered(FIRST, 10, "length")])  # "at least 10" agrees with any more
    assert lengths.metrics() == {"sched/length_pred_mae": 0.0}


def test_growth_is_that_of_tails():
    lengths = LengthPredictor(momentum=0.0)
    assert lengths.growth(0.75) == 1
    for tail in (100, 110, 220, 110):
        lengths.learn(samples_for([[10, tail]]))
    assert [round(lengths.growth(quantile), 6) for quantile in (0.0, 0.5, 1.0)] == [0.5, 1.1, 2.0]


def test_the_prompts_answered_last_are_kept():
    lengths = LengthPredictor(max_prompts=2)
    first, second, third = requests_for(3)
    for request in (first, second, first, third):
        lengths.learn([answered(request, 7)])
    assert len(lengths) == 2
    assert [lengths.predict(request).is_known for request in (first, second, third)] == [True, False, True]


def test_state_is_plain_and_complete():
    lengths = LengthPredictor()
    lengths.learn(samples_for([[10, 20], [1000, 30]]))
    lengths.learn(samples_for([[14, 28]]))
    state = lengths.state_dict()
    again = LengthPredictor()
    again.load_state_dict(state)
    assert again.state_dict() == state
    assert predicted(again, SECOND) == predicted(lengths, SECOND)
    assert again.growth(0.75) == lengths.growth(0.75) == pytest.approx(1.4)


# -- the cost of queues ----------------------------------------------------------------------------------------------


def test_a_queue_costs_passes_and_tokens():
    assert QueueCost().time(100, 640) == pytest.approx(100 + 640 / 128)
    cost = QueueCost([[10, 2.0], [30, 3.0], [60, 4.5]])  # 1.5 + tokens / 20
    assert cost.time(10, 40) == pytest.approx(15 + 2)
    assert cost.time(np.array([10.0, 0.0]), np.array([40.0, 20.0])).tolist() == pytest.approx([17, 1])


def test_acceptance_makes_passes_fewer_and_tokens_dearer():
    cost = QueueCost()
    cost.learn([answered(FIRST, 30, passes=10, drafted=40)])  # 3 tokens and 5 verified a pass; half counts
    assert (cost.tokens_per_pass, cost.verified) == (2.0, 3.0)
    assert cost.time(100, 640) == pytest.approx((100 + 3 * 640 / 128) / 2)
    again = QueueCost()
    again.load_state_dict(cost.state_dict())
    assert (again.tokens_per_pass, again.verified) == (2.0, 3.0)
    cost.learn([answered(FIRST, 30)])  # from a backend that does not count passes
    assert cost.tokens_per_pass == 2.0
