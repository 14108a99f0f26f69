"""Answers that are asked for in pieces: the same tokens, and most of them are known when an engine is lost."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import replace

import pytest

from rhymerl.backends.remote import in_flight
from rhymerl.drafters import NoDrafter
from rhymerl.testing import make_requests
from tests.backends.sglang.fake_engine import FakeEngine, answer_of
from tests.backends.sglang.test_servers import loop_over, run
from tests.backends.sglang.test_session import all_of, assert_whole, connected, soon


@pytest.fixture(autouse=True)
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_flight, "_FIRST_PIECE", 4)
    monkeypatch.setattr(in_flight, "_LEAST_PIECE", 2)


def num_asked(engine: FakeEngine) -> int:
    return engine.calls.count("/generate")


@pytest.mark.parametrize("stop_token_ids", [(1,), ()])
def test_answers_are_those_without_pieces(engine, flat_policy, stop_token_ids):
    engine.token_s = 0.001
    requests = make_requests(5, group_size=2, max_tokens=40, stop_token_ids=stop_token_ids)
    found = []
    for piece_s in (None, 0.01):
        with connected(engine, flat_policy, NoDrafter(), piece_s=piece_s) as backend:
            before = num_asked(engine)
            backend.submit(requests)
            done = all_of(backend, len(requests))
            assert_whole(done, requests)
            found.append({name: (each.finish_reason, each.num_passes) for name, each in done.items()})
            asked = num_asked(engine) - before
            assert asked == 10 if piece_s is None else asked > 20
            metrics = backend.metrics()
            assert metrics["rollout/spec_accept_length"] == 1
    assert found[0] == found[1]


def test_what_is_there_is_told_and_what_is_taken_back_goes_on(engine, flat_policy):
    engine.token_s, engine.holds_at = 0.001, 11
    requests = make_requests(6, max_tokens=40, stop_token_ids=())
    with connected(engine, flat_policy, NoDrafter(), piece_s=0.004) as backend:
        backend.submit(requests)
        soon(lambda: len(backend.outputs()) == 4)  # as many as run; the others wait behind them
        soon(lambda: sum(position == 10 for _, position, _ in engine.sampled) == 4)  # all of these are held
        soon(lambda: all(length >= 5 for length in list(backend.progress().values())[:4]))
        for each in backend.outputs():
            assert each.token_ids.tolist() == answer_of(each.request)[: len(each.output)]
            assert backend.progress()[each.request.id] >= len(each.output)
        assert list(backend.progress().values())[4:] == [0, 0]
        assert not engine.waiting
        back = backend.withdraw()
        assert sorted(len(each.output) for each in back) == [0, 0, 11, 11, 11, 11]
        engine.go.set()
        backend.submit([each.resume() if len(each.output) else each.request for each in back])
        done = all_of(backend, 6)
        assert_whole({name: replace(each) for name, each in done.items()}, requests)
    assert set(Counter((seed, position) for seed, position, _ in engine.sampled).values()) == {1}, "none twice"


def told_of(pool, worker: int) -> int:
    """How many requests of a worker are known with their first tokens."""
    with pool.changed:
        return sum(
            each.worker.get(name) == worker and len(output) >= 4
            for each in pool.steps_in_flight
            for name, output in each.outputs.items()
        )


def test_a_server_that_is_lost_costs_the_last_pieces_alone(flat_policy):
    with FakeEngine() as first, FakeEngine() as second:
        for engine in (first, second):
            engine.token_s, engine.holds_at = 0.002, 9
        with loop_over([first, second], flat_policy, piece_s=0.01) as loop:
            pool = loop.workers

            def lose_one() -> None:
                soon(lambda: told_of(pool, 0) == 4)  # of all that it runs
                first.vanish()
                soon(lambda: pool.num_lost)
                for engine in (first, second):
                    engine.go.set()

            thread = threading.Thread(target=lose_one)
            thread.start()
            next(run(loop, flat_policy, range(1)))
            thread.join()
        sampled = Counter((seed, position) for engine in (first, second) for seed, position, _ in engine.sampled)
        twice = Counter(seed for (seed, _), count in sampled.items() if count > 1)
        assert len({seed for seed, _, _ in first.sampled}) >= 3, "it had begun"
        assert all(count <= 5 for count in twice.values()), "whole answers were sampled again"
