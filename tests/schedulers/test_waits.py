"""Predicted waits of episodes for their environments: by hand, and in steps that end sooner for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from rhymerl.schedulers import HistoPipeScheduler, PackedScheduler, SortedScheduler
from rhymerl.schedulers.predicting import WaitPredictor
from rhymerl.schedulers.queue_cost import QueueLoad
from rhymerl.types import Completion, Output, RolloutRequest, Sample, TurnEnd
from tests.schedulers.answers import answered, progress_of, requests_for, samples_for
from tests.schedulers.test_orders import prompts
from tests.schedulers.test_plans import each_scheduler, ids


def episode(request: RolloutRequest, waits: Sequence[float], *, turn: int = 10, reply: int = 4, token_s: float = 0.1):
    """Return a sample whose turns have `turn` tokens; replies of `reply` tokens follow `waits`, all but the last."""
    now, start, turns = 1000.0, 0, []
    for number, wait in enumerate(waits, start=1):
        now += turn * token_s + wait
        end = start + turn
        start = end + (reply if number < len(waits) else 0)
        turns.append(TurnEnd(start=end, stop=start, text="", waited_s=wait, replied_at=now))
    sample = answered(request, start, passes=turn * len(waits))
    output = replace(sample.completion.output, turns=tuple(turns))
    return replace(sample, completion=Completion(request=request, output=output))


def episodes_for(waits: Sequence[Sequence[float]], *, group_size: int = 1, **settings) -> list[Sample]:
    """Return `group_size` equal episodes for prompt 0, 1, ..."""
    requests = requests_for(len(waits), group_size)
    return [episode(request, waits[int(request.prompt.id)], **settings) for request in requests]


# -- predictions -----------------------------------------------------------------------------------------------------


def test_a_wait_counts_the_tokens_that_could_be_sampled_meanwhile():
    waits, (first, second, other) = WaitPredictor(), requests_for(3)
    assert waits.predict(first) == 0
    waits.learn(episodes_for([[1.0, 2.0, 0.5], [0.0, 0.0, 0.0]]))
    assert [waits.predict(each) for each in (first, second, other)] == pytest.approx([35, 0, 0])
    waits.learn(episodes_for([[1.0, 0.0, 0.5], [0.0, 0.0, 0.0]], token_s=0.3))  # (3.5 + 1.5) / 2 s, 0.2 s a token
    assert waits.predict(first) == pytest.approx(12.5)


def test_a_group_waits_as_long_as_its_median_and_a_token_takes_what_it_takes_unhindered():
    waits, requests = WaitPredictor(), requests_for(1, 3)
    waits.learn(
        [
            episode(request, each, token_s=token_s)
            for request, each, token_s in zip(requests, ([1, 1], [2, 2], [9, 9]), (0.5, 0.2, 4.0), strict=True)
        ]
    )
    assert waits.predict(requests[0]) == pytest.approx(4 / 0.2)


def test_without_two_replies_nobody_knows_what_a_token_takes():
    waits, (request,) = WaitPredictor(), requests_for(1)
    waits.learn([episode(request, [5.0])])
    assert waits.predict(request) == 0
    first, limit = episode(request, [5.0, 0.0]).completion.output.turns
    turns = first, replace(limit, replied_at=0.0)  # nobody was asked at the limit
    completion = Completion(request=request, output=replace(Output.of(np.zeros(24)), turns=turns))
    waits.learn([replace(answered(request, 24), completion=completion)])
    assert waits.predict(request) == 0


def test_waits_are_kept_in_the_state_and_within_bounded_memory():
    waits, requests = WaitPredictor(max_prompts=2), requests_for(3)
    waits.learn(episodes_for([[1.0, 1.0]] * 3))
    assert [waits.predict(each) for each in requests] == pytest.approx([0, 20, 20])
    again = WaitPredictor()
    again.load_state_dict(waits.state_dict())
    assert again.state_dict() == waits.state_dict()
    assert again.predict(requests[1]) == waits.predict(requests[1])


# -- plans -----------------------------------------------------------------------------------------------------------


@each_scheduler
def test_plans_are_those_of_answers_that_never_wait(make):
    """Also where the run is to repeat bit for bit, so that nothing may follow the clock."""
    requests, lengths = requests_for(9, 2), [10 * (37 * number % 7 + 1) for number in range(9)]
    plans = []
    for waited_s, lockstep in ((None, False), (0.0, False), (0.3, True)):
        scheduler = make()
        scheduler.lockstep = lockstep
        for _ in range(2):
            if waited_s is None:
                samples = samples_for([[length] * 2 for length in lengths])
            else:
                turns = [[waited_s * number, waited_s] for number in range(9)]
                samples = [
                    episode(request, turns[int(request.prompt.id)], turn=lengths[int(request.prompt.id)] // 2, reply=0)
                    for request in requests
                ]
            scheduler.learn([replace(sample, completion=without_passes(sample)) for sample in samples])
        plan = scheduler.plan(requests, 3, 1)
        scheduler.observe(progress_of(plan, [[5 if i % 2 else None for i in range(len(queue))] for queue in plan]))
        plans.append([ids(plan), ids(scheduler.plan(requests, 3, 2))])
    assert plans[1] == plans[2] == plans[0]


def without_passes(sample: Sample) -> Completion:
    return replace(sample.completion, output=replace(sample.completion.output, num_passes=0))


@each_scheduler
def test_a_resumed_scheduler_plans_the_same_waits(make):
    scheduler, requests = make(), requests_for(9, 3)
    scheduler.learn(episodes_for([[0.1 * (number % 4), 0.5] for number in range(9)], group_size=3))
    resumed = make()
    resumed.load_state_dict(scheduler.state_dict())
    assert ids(resumed.plan(requests, 4, 3)) == ids(scheduler.plan(requests, 4, 3))
    assert resumed.state_dict() == scheduler.state_dict()


@pytest.mark.parametrize("make", [SortedScheduler, PackedScheduler])
def test_what_waits_long_begins_early_and_costs_no_tokens(make):
    scheduler = make()
    scheduler.learn(episodes_for([[0.0, 0.0], [0.0, 0.0], [3.0, 2.0], [0.0, 1.0]]))
    assert prompts(scheduler.plan(requests_for(4), 1, 0)) == [["2", "3", "0", "1"]]
    assert [piece.total for piece in scheduler.pieces(requests_for(4), 1)] == [20] * 4


def test_histopipe_puts_like_times_together():
    scheduler = HistoPipeScheduler(tier=1)
    scheduler.learn(episodes_for([[0.0, 0.0], [2.0, 0.0], [0.0, 0.1], [3.0, 0.0]]))
    assert prompts(scheduler.plan(requests_for(4), 2, 1)) == [["0", "2"], ["1", "3"]]


def test_packed_counts_what_a_worker_still_waits_for():
    scheduler = PackedScheduler()
    scheduler.learn(episodes_for([[2.5, 2.5], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]]))
    requests = requests_for(4)
    plan = scheduler.plan(requests, 2, 1)
    assert prompts(plan) == [["0", "2"], ["1", "3"]]
    # Halfway, worker 0 still has 10 tokens and 25 of waiting to go; worker 1 has 15.
    scheduler.observe(progress_of(plan, [[10, None], [5, None]]))
    assert scheduler.releases(2, 2).tolist() == pytest.approx([35 + 10 / 128, 15 + 15 / 128])
    assert prompts(scheduler.plan(requests, 2, 2)) == [["1"], ["0", "2", "3"]]  # else worker 0 would get the first


def test_a_wait_takes_no_slot():
    load = QueueLoad(1)
    load.add(1, 10, 10, wait=100)
    load.add(2, 30, 30)
    assert (load.passes, load.total) == (110, 70)
    load.add(1, 50, 50)
    assert load.passes == 120
