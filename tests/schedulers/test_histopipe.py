"""HistoPipe by hand (arXiv 2508.18588): its groups, their workers, and what migrates."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from rhymerl.schedulers import HistoPipeScheduler
from rhymerl.schedulers.histopipe import linear_workers, share_out
from tests.schedulers.answers import progress_of, requests_for, samples_for
from tests.schedulers.test_orders import prompts

TOKENS_ALONE = [[1, 1.0], [2, 2.0]]  # a queue takes as long as it has tokens
PASSES_ALONE = [[1, 1.0], [1000, 1.0]]  # as long as its last answer


def test_tier_1_turns_round_from_step_to_step():
    scheduler = HistoPipeScheduler(tier=1)
    requests = requests_for(6, 2)
    assert prompts(scheduler.plan(requests, 3, 1)) == [["0", "3"], ["1", "4"], ["2", "5"]]  # nothing is known
    scheduler.learn(samples_for([[60] * 2, [10] * 2, [50] * 2, [20] * 2, [40] * 2, [30] * 2]))
    assert prompts(scheduler.plan(requests, 3, 1)) == [["1", "3"], ["5", "4"], ["2", "0"]]
    assert prompts(scheduler.plan(requests, 3, 2)) == [["2", "0"], ["5", "4"], ["1", "3"]]


def test_tier_1_with_fewer_prompts_than_workers_splits_groups():
    scheduler = HistoPipeScheduler(tier=1)
    scheduler.learn(samples_for([[60] * 4, [10] * 4]))
    sizes = [len(queue) for queue in scheduler.plan(requests_for(2, 4), 3, 1)]
    assert sizes == [3, 3, 2]


# -- tier 2 ----------------------------------------------------------------------------------------------------------


def slope_of(counts, tau, start) -> float:
    """The smallest slope for which group n is done at start + n d."""
    if tau[0, counts[0] - 1] > start:
        return float("inf")
    return max((tau[n, k - 1] - start) / n for n, k in enumerate(counts) if n)


@pytest.mark.parametrize("train_time", [0.0, 250.0])
@pytest.mark.parametrize("seed", range(8))
def test_tier_2_finds_the_smallest_slope(seed, train_time):
    """The slope is compared with every way to give each of three groups one to four of the workers."""
    total = np.sort(np.random.default_rng(seed).uniform(100, 4000, 3))[:, None]
    tau = total / 10 + total / 4 / np.arange(1, 5)
    found = linear_workers(tau, 10, train_time=train_time)
    assert sum(found) <= 10
    start = max(tau[0, -1], train_time)
    best = min(slope_of(counts, tau, start) for counts in product(range(1, 5), repeat=3) if sum(counts) <= 10)
    assert slope_of(found, tau, start) == pytest.approx(best, rel=1e-6)


def test_the_first_group_needs_no_more_workers_than_end_it_with_the_update():
    tau = np.array([[12.0, 6, 4, 3], [24, 12, 8, 6], [48, 24, 16, 12]])
    assert linear_workers(tau, 9) == [4, 2, 3]  # t0 = 3
    assert linear_workers(tau, 9, train_time=6.0) == [2, 3, 4]
    assert linear_workers(tau, 9, train_time=12.0) == [1, 2, 4]  # t0 + n d is 12 everywhere


def test_no_slope_is_enough_where_the_first_group_asks_for_too_many():
    tau = np.array([[12.0, 6, 4, 3], [24, 12, 8, 6]])
    assert linear_workers(tau, 5) == [4, 1]
    assert linear_workers(tau, 4) is None


def test_workers_left_over_go_where_a_worker_has_most_to_save():
    assert share_out([1, 1], [100, 40], 2) == [1, 1]
    assert share_out([1, 1], [100, 40], 4) == [2, 2]  # 100 - 50, then 40 - 20 before 50 - 33


@pytest.mark.parametrize(
    ("lengths", "settings", "slots", "sizes"),
    [
        # Groups of 80, 160 and 880 tokens. The first one has to be done at 30, with three workers; the last one gets
        # two of the others. A worker has 30 + 800 tokens at most in two steps, and 40 + 800 with tier 1.
        ([10, 10, 20, 20, 20, 200], {}, None, [3, 3, 2, 8, 4, 4]),
        ([10, 10, 20, 20, 20, 200], {"train_time": 100.0}, None, [8, 4, 4, 3, 3, 2]),  # one worker is done early enough
        ([10, 10, 20, 20, 20, 200], {"tier": 1}, None, [4] * 6),
        ([10, 10, 11, 11, 12, 12], {}, None, [4] * 6),  # at most 30 + 88 tokens, and 40 + 48 with tier 1
        ([10, 10, 20, 20, 20, 200], {"max_workers": 5}, None, [4] * 6),  # the first group alone leaves too few
        # If a worker answers all at once, splitting a group saves no pass: 20 + 200, and 10 + 200 with tier 1.
        ([10, 10, 20, 20, 20, 200], {"costs": PASSES_ALONE}, None, [4] * 6),
        # If it answers two at a time, three workers take 220 passes for the last group: 20 + 220, and 20 + 400 with
        # tier 1.
        ([10, 10, 20, 20, 20, 200], {"costs": PASSES_ALONE}, 2, [4, 4, 8, 3, 3, 2]),
    ],
)
def test_tier_2_unless_it_is_impossible_or_tier_1_is_predicted_to_be_faster(lengths, settings, slots, sizes):
    scheduler = HistoPipeScheduler(**{"max_workers": 3, "costs": TOKENS_ALONE, "keep_groups": False, **settings})
    scheduler.max_running = slots
    scheduler.learn(samples_for([[length] * 4 for length in lengths]))
    assert [len(queue) for queue in scheduler.plan(requests_for(6, 4), 6, 1)] == sizes
    assert [len(queue) for queue in scheduler.plan(requests_for(6, 4), 6, 2)] == sizes[::-1]


# -- migration -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [1, 2])
def test_histopipe_migrates_by_what_it_planned(step):
    scheduler = HistoPipeScheduler(tier=1)
    scheduler.learn(samples_for([[100] * 10, [300] * 10]))
    requests = requests_for(2, 10)
    plan = scheduler.plan(requests, 2, step)
    short, long = (0, 1) if step == 1 else (1, 0)  # the worker of the short group
    tokens = {short: [None] * 9 + [111], long: [5] * 10}
    progress = progress_of(plan, [tokens[0], tokens[1]], step=step)
    scheduler.plan(requests, 2, 0)  # an evaluation in between
    (move,) = scheduler.rebalance(progress)
    assert (move.request_id, move.worker) == ("0/9", long)
    assert HistoPipeScheduler(tier=1).rebalance(progress) == []  # it has planned nothing
    resumed = HistoPipeScheduler(tier=1)
    resumed.load_state_dict(scheduler.state_dict())  # where run-ahead had the step planned before the checkpoint
    assert resumed.rebalance(progress) == [move]
    scheduler.migrate = False
    assert scheduler.rebalance(progress) == []


@pytest.mark.parametrize("step", [1, 2])
def test_what_an_answer_may_have_is_what_its_own_group_may(step):
    """The last answer of the long group is within its bound, and would not be within that of the short one."""
    scheduler = HistoPipeScheduler(tier=1)
    scheduler.learn(samples_for([[100] * 10, [300] * 10, [500] * 10]))
    plan = scheduler.plan(requests_for(3, 10), 3, step)
    tokens = {"0": [None] * 10, "1": [None] * 9 + [300], "2": [5] * 10}
    progress = progress_of(plan, [tokens[queue[0].prompt.id] for queue in plan], step=step)
    assert scheduler.rebalance(progress) == []


@pytest.mark.parametrize(
    ("longest", "bound"),
    [
        ([100, 120, 150, 200], 150),  # the third quartile of 1, 1.2, 1.5 and 2
        ([100, 105, 105, 200], 110),  # of 1, 1.05, 1.05 and 2, which is less than beta
    ],
)
def test_answers_that_outgrow_their_group_as_many_do_stay(longest, bound):
    scheduler = HistoPipeScheduler(tier=1, beta=1.1)
    scheduler.learn(samples_for([[100] * 10] * 4))
    scheduler.learn(samples_for([[100] * 9 + [length] for length in longest]))
    plan = scheduler.plan(requests_for(4, 10), 4, 1)
    resumed = HistoPipeScheduler(tier=1, beta=1.1)
    resumed.load_state_dict(scheduler.state_dict())
    for each in (scheduler, resumed):
        for tokens, moves in ((bound, 0), (bound + 1, 1)):
            progress = progress_of(plan, [[None] * 9 + [tokens], [5] * 10, [5] * 10, [5] * 10])
            assert len(each.rebalance(progress)) == moves
