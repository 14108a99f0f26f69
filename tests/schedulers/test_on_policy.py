"""Plans for workers that wait: the scheduler's own, or longest answers first where those end clearly sooner."""

from __future__ import annotations

import pytest

from rhymerl.schedulers import FIFOScheduler, HistoPipeScheduler, PacedScheduler, PackedScheduler, SortedScheduler
from rhymerl.schedulers.base import check_plan
from rhymerl.schedulers.on_policy import on_policy
from rhymerl.types import RolloutRequest
from tests.schedulers.answers import answered, requests_for

LENGTHS = [100, 110, 120, 130, 200, 210, 800, 810]


def requests() -> list[RolloutRequest]:
    return requests_for(len(LENGTHS), 4)


def learned(scheduler):
    """One that has seen answers of these lengths."""
    scheduler.learn([answered(request, LENGTHS[int(request.prompt.id)]) for request in requests()])
    return scheduler


def names(plan) -> list[list[str]]:
    return [[request.id for request in queue] for queue in plan]


def tokens(plan) -> list[int]:
    """Those of each queue."""
    return [sum(LENGTHS[int(request.prompt.id)] for request in queue) for queue in plan]


@pytest.mark.parametrize("scheduler", [SortedScheduler, PackedScheduler, PacedScheduler])
def test_a_plan_that_ends_as_soon_stays(scheduler):
    own, strict = learned(scheduler()), on_policy(learned(scheduler()))
    assert names(strict.plan(requests(), 2, 1)) == names(own.plan(requests(), 2, 1))
    assert not strict.migrates
    assert not strict.observes


def test_similar_lengths_on_a_worker_are_dealt_anew_where_all_wait_for_the_longest():
    # With a costly token the worker with both long prompts ends last by far.
    costs = [(1, 1.0), (2, 2.0)]
    own, strict = learned(HistoPipeScheduler(costs=costs)), on_policy(learned(HistoPipeScheduler(costs=costs)))
    plan = strict.plan(requests(), 2, 1)
    check_plan(plan, requests(), num_workers=2, scheduler="OnPolicyScheduler")
    assert max(tokens(own.plan(requests(), 2, 1))) > 1.5 * max(tokens(plan))
    assert names(plan) == names(learned(SortedScheduler()).plan(requests(), 2, 1))


def test_answers_that_wait_for_a_slot_count():
    # Passes cost the same whatever is in them, so only a worker with few slots takes longer for more answers.
    costs = [(1, 1.0), (1000, 1.0)]
    scheduler = learned(HistoPipeScheduler(costs=costs, tier=1))
    own = names(scheduler.plan(requests(), 2, 1))
    assert names(on_policy(scheduler).plan(requests(), 2, 1)) == own
    scheduler.max_running = 2
    assert names(on_policy(scheduler).plan(requests(), 2, 1)) != own


def test_a_scheduler_that_predicts_nothing_is_left_as_it_is():
    scheduler = FIFOScheduler()
    assert on_policy(scheduler) is scheduler


def test_the_time_of_a_queue_is_of_whole_pieces_or_of_a_request_each():
    scheduler = learned(SortedScheduler(costs=[(0, 1.0), (10, 2.0)]))
    scheduler.work_for(1)
    (piece,) = scheduler.pieces(requests()[:4], 1)
    # A pass costs 1, and 0.1 more for a token: four answers of 100 tokens, one after another, or one of them.
    assert scheduler.time([piece]) == pytest.approx(400 + 40)
    assert scheduler.time([piece], whole=False) == pytest.approx(100 + 10)
