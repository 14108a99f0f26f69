"""Every scheduler's promises: a plan is a partition, the same for the same knowledge, and takes little work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rhymerl.config import instantiate
from rhymerl.errors import ConfigError
from rhymerl.schedulers import (
    FIFOScheduler,
    HistoPipeScheduler,
    Move,
    PacedScheduler,
    PackedScheduler,
    Scheduler,
    SortedScheduler,
)
from rhymerl.schedulers.base import check_moves, check_plan, plan_hash
from rhymerl.types import RolloutRequest
from tests.bytecodes import bytecodes
from tests.schedulers.answers import progress_of, requests_for, samples_for

MAKERS = {
    "fifo": FIFOScheduler,
    "sorted": SortedScheduler,
    "ascending": lambda: SortedScheduler(order="ascending", keep_groups=False),
    "packed": PackedScheduler,
    "packed, split": lambda: PackedScheduler(keep_groups=False),
    "tier 1": lambda: HistoPipeScheduler(tier=1),
    "tier 2": HistoPipeScheduler,
    "tier 2, split": lambda: HistoPipeScheduler(groups_per_worker=0.3, keep_groups=False),
    "paced": PacedScheduler,
    "paced, two at a time": lambda: PacedScheduler(max_running=2),
    "paced, split": lambda: PacedScheduler(workers=0.7, keep_groups=False),
}
each_scheduler = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)

lengths = st.lists(st.lists(st.integers(1, 1000), min_size=1, max_size=4), max_size=12)


def ids(plan: Sequence[Sequence[RolloutRequest]]) -> list[list[str]]:
    return [[request.id for request in queue] for queue in plan]


@each_scheduler
@given(
    known=lengths,
    num_prompts=st.integers(0, 12),
    group_size=st.integers(1, 4),
    num_workers=st.integers(1, 9),
    step=st.integers(0, 5),
)
def test_every_plan_is_a_partition(make, known, num_prompts, group_size, num_workers, step):
    scheduler = make()
    if known:
        scheduler.learn(samples_for(known))
    requests = requests_for(num_prompts, group_size)
    plan = scheduler.plan(requests, num_workers, step)
    check_plan(plan, requests, num_workers=num_workers, scheduler="it")
    # Run-ahead: half of the step is unfinished when the next one is planned; an evaluation has been planned in between.
    counts = [[i if i % 2 else None for i in range(len(queue))] for queue in plan]
    progress = progress_of(plan, counts, step=step)
    moves = scheduler.rebalance(progress)
    check_moves(moves, progress, scheduler="it")
    scheduler.observe(progress)
    scheduler.plan(requests[:1], 1, 0)
    following = scheduler.plan(requests, num_workers, step + 1)
    check_plan(following, requests, num_workers=num_workers, scheduler="it")


@each_scheduler
def test_a_resumed_scheduler_plans_the_same(make):
    scheduler, requests = make(), requests_for(9, 3)
    scheduler.learn(samples_for([[10 * i, 30 * i, 50] for i in range(1, 8)]))
    resumed = make()
    resumed.load_state_dict(scheduler.state_dict())
    plans = [each.plan(requests, 4, 3) for each in (scheduler, resumed)]
    assert ids(plans[0]) == ids(plans[1])
    assert plan_hash(plans[0]) == plan_hash(plans[1])
    assert resumed.state_dict() == scheduler.state_dict()


@each_scheduler
def test_groups_stay_together_where_that_is_asked_for(make):
    """Four workers could have equal parts of five groups only if these were split."""
    scheduler, requests = make(), requests_for(5, 3)
    scheduler.learn(samples_for([[length] * 3 for length in range(1, 6)]))
    plan = scheduler.plan(requests, 4, 1)
    are_whole = all(len({request.prompt.id for request in queue}) * 3 == len(queue) for queue in plan)
    assert are_whole == getattr(scheduler, "keep_groups", True)


@each_scheduler
def test_the_work_of_a_plan_grows_with_the_requests_and_not_faster(make):
    def of_request(factor: int) -> float:
        scheduler, requests = make(), requests_for(25 * factor, 16)
        scheduler.learn(samples_for([[(37 * number) % 997 + 1] for number in range(25 * factor)]))
        return bytecodes(lambda: scheduler.plan(requests, 8 * factor, 1)) / len(requests)

    small, large = of_request(2), of_request(8)  # tier 2 of one would not even find a slope
    assert large < 1.1 * small
    assert large < 700


# -- checks ----------------------------------------------------------------------------------------------------------


def test_the_hash_says_who_has_what_in_which_order():
    first, second, third = requests_for(3)
    plans = [
        [[first, second], [third]],
        [[second, first], [third]],
        [[first], [second, third]],
        [[first, second, third], []],
    ]
    assert len({plan_hash(plan) for plan in plans}) == 4
    assert plan_hash(plans[0]) == plan_hash([(first, second), (third,)])
    assert len(plan_hash(plans[0])) == 32


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ([[0, 1], [1]], r"it.plan doubles the request '1/0' \(1 such\)"),
        ([[0, 3], [1, 2]], r"it.plan invents the request '3/0' \(1 such\)"),
        ([[0], []], r"it.plan drops the request '1/0' \(2 such\)"),
        ([[0, 1, 2]], "it.plan returned 1 queues for 2 workers"),
    ],
)
def test_what_is_no_partition_is_refused_by_name(plan, message):
    requests = requests_for(4)
    with pytest.raises(ValueError, match=message):
        check_plan([[requests[i] for i in queue] for queue in plan], requests[:3], num_workers=2, scheduler="it")


def test_a_plan_that_doubles_everything_is_refused_at_once():
    comparisons = 0

    class Name(str):
        __slots__ = ()
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            nonlocal comparisons
            comparisons += 1
            return str.__eq__(self, other)

    requests, again = ([replace(each, id=Name(each.id)) for each in requests_for(1000)] for _ in range(2))
    with pytest.raises(ValueError, match="1000 such"):
        check_plan([[*requests, *again]], requests, num_workers=1, scheduler="it")
    assert comparisons < 10 * 1000, "each request is compared with all others"


def test_a_scheduler_of_ones_own_needs_a_plan_and_nothing_else():
    class Mine(Scheduler):
        def plan(self, requests, num_workers, step):
            return [list(requests[worker::num_workers]) for worker in range(num_workers)]

    mine, requests = Mine(), requests_for(3)
    plan = mine.plan(requests, 2, 0)
    check_plan(plan, requests, num_workers=2, scheduler="Mine")
    assert mine.rebalance(progress_of(plan, [[1, 2], [3]])) == []
    assert not mine.migrates
    mine.observe(progress_of(plan, [[1, 2], [3]]))
    assert (mine.learn([]), mine.metrics(), mine.state_dict(), mine.load_state_dict({})) == (None, {}, {}, None)
    assert Move(request_id="0/0", worker=1).worker == 1

    assert not HistoPipeScheduler(migrate=False).observes


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("SortedScheduler", {"order": "up"}, "scheduler.order='up': expected"),
        ("PackedScheduler", {"momentum": 1.0}, "scheduler.momentum=1.0: expected at least 0 and less than 1"),
        ("PackedScheduler", {"tail": -0.1}, "scheduler.tail=-0.1: expected at least 0 and less than 1"),
        ("PackedScheduler", {"costs": "none.json"}, "scheduler.costs='none.json': expected a JSON file"),
        ("PackedScheduler", {"costs": [[0, 1]]}, r"scheduler.costs=.*: expected at least two \[tokens, seconds\]"),
        ("HistoPipeScheduler", {"tier": 3}, "scheduler.tier=3: expected"),
        (
            "HistoPipeScheduler",
            {"groups_per_worker": 0.0},
            "scheduler.groups_per_worker=0.0: expected above 0 and at most 1",
        ),
        ("HistoPipeScheduler", {"max_workers": 0}, "scheduler.max_workers=0: expected at least 1"),
        ("HistoPipeScheduler", {"alpha": 1.5}, "scheduler.alpha=1.5: expected 0 to 1"),
        ("HistoPipeScheduler", {"beta": 0.9}, "scheduler.beta=0.9: expected at least 1"),
        ("HistoPipeScheduler", {"train_time": -1.0}, "scheduler.train_time=-1.0: expected at least 0, and finite"),
        ("PacedScheduler", {"workers": 0.0}, "scheduler.workers=0.0: expected above 0 and at most 1"),
        ("PacedScheduler", {"max_running": 0}, "scheduler.max_running=0: expected at least 1, or null"),
        ("LengthPredictor", {"max_prompts": 0}, "scheduler.max_prompts=0: expected at least 1"),
    ],
)
def test_a_wrong_setting_is_named(name, settings, message):
    with pytest.raises(ConfigError, match=message):
        instantiate({"_target_": f"rhymerl.schedulers.{name}", **settings}, key="scheduler")
