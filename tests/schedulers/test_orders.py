"""The orders of single schedulers, worked by hand."""

from __future__ import annotations

import numpy as np

from rhymerl.schedulers import PacedScheduler, PackedScheduler, SortedScheduler
from rhymerl.schedulers.histopipe import outliers_to_running
from rhymerl.schedulers.queue_cost import QueueLoad
from tests.schedulers.answers import progress_of, requests_for, samples_for


def prompts(plan) -> list[list[str]]:
    """The distinct prompts of each queue, in order."""
    return [list(dict.fromkeys(request.prompt.id for request in queue)) for queue in plan]


def test_sorted_gives_the_longest_to_whoever_has_least():
    scheduler = SortedScheduler()
    scheduler.learn(samples_for([[10], [50], [30], [20]]))
    assert prompts(scheduler.plan(requests_for(4), 2, 0)) == [["1", "0"], ["2", "3"]]
    scheduler = SortedScheduler(order="ascending")
    scheduler.learn(samples_for([[10], [50], [30], [20]]))
    assert prompts(scheduler.plan(requests_for(4), 2, 0)) == [["0", "2"], ["3", "1"]]


def test_an_unknown_prompt_counts_as_long():
    scheduler = SortedScheduler()
    scheduler.learn(samples_for([[10], [50], [30]]))
    assert prompts(scheduler.plan(requests_for(4), 1, 0)) == [
        ["1", "3", "2", "0"]
    ]  # 3 as long as the longest, in data order


def test_packed_knows_who_is_free_first():
    scheduler = PackedScheduler()
    scheduler.learn(samples_for([[100], [90], [80], [10]]))
    requests = requests_for(4)
    plan = scheduler.plan(requests, 2, 1)
    assert prompts(plan) == [["0"], ["1", "2", "3"]]  # beside a longer answer a shorter one costs next to nothing
    # Worker 0 has still 95 tokens of prompt 0 to go, worker 1 nothing: now that one gets the longest.
    scheduler.observe(progress_of(plan, [[5], [None] * 3]))
    assert prompts(scheduler.plan(requests, 2, 2)) == [["1"], ["0", "2", "3"]]
    assert prompts(scheduler.plan(requests, 2, 7)) == prompts(plan)  # that was another step's progress


def test_outliers_move_to_the_longest_group_that_is_still_running():
    requests = requests_for(40)
    plan = [requests[:10], requests[10:20], requests[20:30], requests[30:]]
    done = [None] * 9
    # Worker 0 and 1 are down to one request, 2 and 3 still run two. Group 0 expected 100 at most, 2 and 3 equally long.
    tokens = [[*done, 115], [*done, 240], [None] * 8 + [10, 10], [None] * 8 + [10, 10]]
    longest = np.array([100.0, 200.0, 300.0, 300.0])
    (one, two) = outliers_to_running(progress_of(plan, tokens), longest, alpha=0.1, beta=1.1)
    assert (one.request_id, one.worker) == ("9/0", 2)
    assert (two.request_id, two.worker) == ("19/0", 3)  # where there are fewer by now
    assert outliers_to_running(progress_of(plan, tokens), longest, alpha=0.1, beta=1.3) == []
    early = [[None] * 8 + [115, 115], *tokens[1:]]
    moves = outliers_to_running(progress_of(plan, early), longest, alpha=0.1, beta=1.1)
    assert [move.request_id for move in moves] == ["19/0"]  # worker 0 still has two of ten


def test_migration_needs_a_longer_group_that_runs():
    requests = requests_for(2)
    progress = progress_of([requests[:1], requests[1:]], [[500], [None]])
    assert outliers_to_running(progress, np.array([100.0, 300.0]), alpha=0.1, beta=1.1) == []
    progress = progress_of([requests[:1], requests[1:]], [[500], [500]])
    assert outliers_to_running(progress, np.array([300.0, 100.0]), alpha=0.1, beta=1.1) == []


def test_paced_fills_workers_by_time():
    # 400 with 4 answers costs 400 + 1600/128 = 412.5; the others 100 + 400/128 each, but 100 + 3 * 400/128 together.
    scheduler = PacedScheduler()
    scheduler.learn(samples_for([[100] * 4, [400] * 4, [100] * 4, [100] * 4]))
    plan = scheduler.plan(requests_for(4, 4), 2, 1)
    assert prompts(plan) == [["1"], ["0", "2", "3"]]


def test_paced_halves_take_turns_while_workers_run_ahead():
    scheduler = PacedScheduler(costs=[[0, 1.0], [1, 2.0]])  # nothing is gained by decoding side by side
    scheduler.learn(samples_for([[100] * 4, [90] * 4, [80] * 4, [70] * 4]))
    requests = requests_for(4, 4)
    first = scheduler.plan(requests, 4, 1)
    assert all(first)  # nobody runs ahead yet
    tokens = [[10] * 4, [10] * 4, [None] * 4, [None] * 4]
    scheduler.observe(progress_of(first, tokens))
    assert [bool(queue) for queue in scheduler.plan(requests, 4, 2)] == [False, False, True, True]


def test_paced_knows_how_many_run_side_by_side():
    # Two answers of 200 on the first worker leave time for all others on the second. Two at a time, these would take
    # 600 passes, and 100 more until the last has ended; four of them on the first one are 400 and 200 there, 400 and
    # 100 on the second.
    scheduler = PacedScheduler()
    scheduler.learn(samples_for([[200] * 2, *([100] * 2 for _ in range(6))]))
    assert [len(queue) for queue in scheduler.plan(requests_for(7, 2), 2, 1)] == [2, 12]
    scheduler.max_running = 2
    assert [len(queue) for queue in scheduler.plan(requests_for(7, 2), 2, 1)] == [6, 8]


def test_packed_knows_how_many_run_side_by_side():
    # Passes cost the same whatever is in them: one worker answers all of 60 while the other answers those of 100. Two
    # at a time, it would take 180.
    scheduler = PackedScheduler(costs=[[1, 1.0], [1000, 1.0]])
    scheduler.learn(samples_for([[100] * 2, *([60] * 2 for _ in range(3))]))
    assert [len(queue) for queue in scheduler.plan(requests_for(4, 2), 2, 1)] == [2, 6]
    scheduler.max_running = 2
    assert [len(queue) for queue in scheduler.plan(requests_for(4, 2), 2, 1)] == [4, 4]


def test_an_answer_enters_when_a_slot_is_free():
    load = QueueLoad(2)
    load.add(2, 50, 80)
    assert load.passes == 80  # the longest of both may last so long
    load.add(1, 40, 40)
    load.add(1, 70, 70)
    assert (load.passes, load.total) == (120, 210)  # 50 + 70, beside 50 + 40
