"""Pass by pass: how many are run, how far each request is, what is counted in whole numbers."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace

import pytest

from rhymerl.backends.embedded import EmbeddedBackend
from rhymerl.budgets import GoodputBudget
from rhymerl.engine.engine import Engine
from rhymerl.testing import RandomTreeDrafter, ScriptedBackend, make_requests, tiny_policy
from rhymerl.types import RolloutRequest
from tests.drafters.requests import resumed
from tests.engine.test_lossless import answers, assert_same


@pytest.fixture(scope="module")
def policy():
    return tiny_policy(num_layers=1)


@pytest.mark.parametrize("max_passes", [0, 1, 3, 11])
def test_exactly_so_many_passes_while_there_is_work(policy, max_passes):
    """Requests of one token end in the first pass, which is no reason to return."""
    engine = Engine(policy.model, max_running=4)
    short, long = make_requests(2, max_tokens=1), make_requests(9, seed=1, max_tokens=24, stop_token_ids=())
    engine.submit([*short, *(replace(each, id=f"long {each.id}") for each in long)])
    done = engine.run(max_passes=max_passes)
    assert engine.totals.passes == max_passes
    assert len(done) == (2 if max_passes else 0)


def test_passes_end_when_nothing_is_left(policy):
    engine = Engine(policy.model)
    engine.submit(make_requests(3, max_tokens=5, stop_token_ids=()))
    assert len(engine.run(max_passes=99)) == 3
    assert engine.totals.passes == 5
    assert engine.run(max_passes=99) == []


def test_passes_end_when_the_time_is_over(policy):
    engine = Engine(policy.model)
    engine.submit(make_requests(3))
    assert engine.run(time.monotonic(), max_passes=5) == []
    assert engine.totals.passes == 0


def test_in_slices_or_at_once_the_answers_are_the_same(policy):
    requests = make_requests(12, group_size=2)
    done = {}
    with EmbeddedBackend(max_running=5) as backend:
        assert backend.counts_passes
        backend.start(policy, RandomTreeDrafter())
        backend.submit(requests)
        while backend.progress():
            done |= {each.request.id: each for each in backend.collect(max_passes=2)}
    assert_same(answers(policy, requests), done)


def test_progress_is_of_all_requests_in_the_order_of_the_queue(policy):
    requests = make_requests(5, max_tokens=24, stop_token_ids=())
    with EmbeddedBackend(max_running=2) as backend:
        backend.start(policy, RandomTreeDrafter())
        assert backend.progress() == {}
        backend.submit([requests[4], requests[0], requests[2], resumed(requests[3], [5] * 7)])
        assert list(backend.progress().items()) == [("4/0", 0), ("0/0", 0), ("2/0", 0), ("3/0", 7)]
        backend.collect(max_passes=3)
        progress = backend.progress()
        assert list(progress) == ["4/0", "0/0", "2/0", "3/0"]
        assert list(progress.values())[2:] == [0, 7]
        assert progress == {each.request.id: len(each.token_ids) for each in backend.withdraw()}
        assert min(progress["4/0"], progress["0/0"]) >= 3


def test_counts_are_whole_and_rates_are_not(policy):
    counts = {"rollout/passes", "rollout/preemptions", "spec/bad_drafts"}
    with EmbeddedBackend() as backend:
        backend.start(policy, RandomTreeDrafter(), budget=GoodputBudget())
        for requests in ([], make_requests(3)):
            backend.submit(requests)
            backend.collect()
            metrics = backend.metrics()
            assert {name for name, value in metrics.items() if type(value) is int} == counts
            assert all(isinstance(value, float) for name, value in metrics.items() if name not in counts)


def test_a_scripted_pass_is_a_batch():
    backend = ScriptedBackend(lambda request: [2], batch=2)
    backend.submit(make_requests(7))
    assert len(backend.collect()) == 2
    assert len(backend.collect(max_passes=2)) == 4
    assert backend.progress() == {"6/0": 0}
    assert len(backend.collect(max_passes=2)) == 1
    assert backend.progress() == {}


@pytest.mark.parametrize(("num_long", "num_tail"), [(8, 0), (1, 8)])
def test_the_tail_is_the_passes_of_few_of_the_requests_that_ran(policy, num_long, num_tail):
    """Not a small batch in many slots."""
    engine = ticking(Engine(policy.model, max_running=64))
    engine.submit(lasting(*[12] * num_long, *[4] * (8 - num_long)))
    engine.run(max_passes=99)
    assert engine.totals.passes == 12
    assert num_tail_passes(engine) == num_tail


def test_a_pass_that_computes_a_prompt_is_not_of_the_tail(policy):
    engine = ticking(Engine(policy.model, max_running=64))
    *first, late = lasting(12, *[4] * 11, 8)
    engine.submit(first)
    engine.run(max_passes=8)
    assert num_tail_passes(engine) == 4
    engine.submit([late])
    engine.run(max_passes=1)
    assert num_tail_passes(engine) == 4
    engine.run(max_passes=99)
    assert (engine.totals.passes, num_tail_passes(engine)) == (16, 11)


def lasting(*lengths: int) -> list[RolloutRequest]:
    requests = make_requests(len(lengths), max_tokens=99, stop_token_ids=())
    return [
        replace(each, sampling=replace(each.sampling, max_tokens=length))
        for each, length in zip(requests, lengths, strict=True)
    ]


def ticking(engine: Engine) -> Engine:
    """Give it a clock by which all passes last equally long."""
    engine.now = itertools.count().__next__
    return engine


def num_tail_passes(engine: Engine) -> float:
    return engine.totals.passes * engine.totals.tail_s / engine.totals.busy_s
