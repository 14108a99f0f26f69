"""Prefetched tokens change the speed and nothing else, and what becomes of them is counted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from rhymerl.backends.embedded import EmbeddedBackend
from rhymerl.budgets import AIMDBudget, FixedBudget, GoodputBudget
from rhymerl.drafters import HistoryTreeDrafter, NGramDrafter, NoDrafter, RunAheadDrafter
from rhymerl.engine.engine import Engine
from rhymerl.testing import make_requests, tiny_policy
from tests.engine.test_drafting import OneIsBad, Packed, drain, oracle_for
from tests.engine.test_lossless import answers, assert_same
from tests.products import pairs_first, values_first

if TYPE_CHECKING:
    from rhymerl.types import IntArray

NODES = 16

AHEAD: dict[str, Callable[[IntArray], IntArray]] = {
    "right": lambda tokens: tokens,
    "wrong from the first": lambda tokens: (tokens + 1) % 19,
    "wrong from the fifth": lambda tokens: np.append(tokens[:4], (tokens[4:] + 1) % 19).astype(np.int32),
    "too short": lambda tokens: tokens[: len(tokens) // 2],
    "too long": lambda tokens: np.append(tokens, [3] * 40).astype(np.int32),
    "empty": lambda tokens: tokens[:0],
}
INNER = {
    "none": NoDrafter,
    "ngram": NGramDrafter,
    "history_tree": lambda: HistoryTreeDrafter(deterministic=True),
}


@pytest.fixture(autouse=True)
def drafts_in_every_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """The passes here are counted exactly, so none goes without drafts only to tell what drafts are worth."""
    monkeypatch.setattr("rhymerl.engine.drafting.is_due_plain", lambda *_: False)


@pytest.fixture(scope="module")
def problem():
    """A policy, requests and their answers."""
    policy = tiny_policy()
    requests = make_requests(8, group_size=3, max_tokens=40)
    return policy, requests, answers(policy, requests)


def with_ahead(requests, plain, change, *, every: int = 1):
    """Each n-th request with what is made of its answer."""
    ahead = {each.id: change(plain[each.id].token_ids) for each in requests[::every]}
    return [replace(each, prefetched=ahead.get(each.id)) for each in requests]


def num_passes(tokens: IntArray, ahead: IntArray) -> int:
    """Return the passes of an answer without any other drafts: what is right is emitted, and one token more."""
    same = np.append(tokens, -1)[: len(ahead)] == ahead[: len(tokens) + 1]
    num_right = len(same) if same.all() else int(same.argmin())
    done = passes = 0
    while done < len(tokens):
        done += min(NODES, num_right - done, len(tokens) - done - 1) + 1 if done <= num_right else 1
        passes += 1
    return passes


@pytest.mark.parametrize(("inner", "change"), values_first(INNER, AHEAD))
def test_they_change_no_token(problem, inner, change):
    policy, requests, plain = problem
    asked = with_ahead(requests, plain, change)
    done = answers(policy, asked, drafter=RunAheadDrafter(inner()), budget=FixedBudget(NODES), max_running=7)
    assert_same(plain, done)
    if inner is NoDrafter:
        needed = {each.id: num_passes(plain[each.id].token_ids, each.prefetched) for each in asked}
        assert {name: each.num_passes for name, each in done.items()} == needed


@pytest.mark.parametrize(
    ("inner", "every", "settings"),
    pairs_first(INNER, [2, 3], [{}, {"kv_tokens": 90, "max_running": 16}, {"max_pass_tokens": 30}]),
)
def test_beside_requests_without_them(problem, inner, every, settings):
    policy, requests, plain = problem
    asked = with_ahead(requests, plain, AHEAD["right"], every=every)
    done = answers(policy, asked, drafter=RunAheadDrafter(inner()), **settings)
    assert_same(plain, done)
    drafted = sum(done[each.id].num_accepted for each in asked[::every])
    assert drafted > 0.6 * sum(len(plain[each.id].token_ids) for each in asked[::every])


@pytest.mark.parametrize(
    "budget", [GoodputBudget(deterministic=True), AIMDBudget(), FixedBudget(8)], ids=["goodput", "aimd", "fixed"]
)
def test_every_budget_lets_them_through(problem, budget):
    """One in three of 24 answers side by side has prefetched tokens, and nothing else is drafted."""
    policy, requests, plain = problem
    asked = with_ahead(requests, plain, AHEAD["right"], every=3)
    done = answers(policy, asked, drafter=RunAheadDrafter(NoDrafter()), budget=budget)
    assert_same(plain, done)
    ahead = [done[each.id] for each in asked[::3]]
    assert sum(each.num_passes for each in ahead) < 0.4 * sum(len(each.token_ids) for each in ahead)


def test_new_weights_in_flight(problem):
    """Keys and values are dropped, and requests wait again; what was prefetched stays theirs."""
    policy, requests, plain = problem
    engine = Engine(policy.model, drafter=RunAheadDrafter(NoDrafter()), kv_tokens=4096, check_drafts=True)
    engine.submit(with_ahead(requests, plain, AHEAD["wrong from the fifth"]))
    done = {each.request.id: each for each in engine.run(max_passes=1)}
    engine.new_weights(1)
    assert_same(plain, done | drain(engine))


def test_bad_drafts_of_the_inner_drafter_cost_nobody_else_theirs(problem):
    policy, requests, plain = problem
    asked = with_ahead(requests, plain, AHEAD["right"], every=2)
    for inner, num_bad in ((OneIsBad(oracle_for(plain).answers), 1), (Packed(starts=[0, 1]), 12)):
        engine = Engine(policy.model, drafter=RunAheadDrafter(inner), max_running=32)
        inner.bad = asked[1].id
        engine.submit(asked)
        done = drain(engine)
        assert_same(plain, done)
        assert engine.totals.bad_drafts >= num_bad
        assert all(done[each.id].num_passes == num_passes(each.prefetched, each.prefetched) for each in asked[::2])


def test_metrics_by_hand():
    """The prefetched tokens of 0/0 are 3 right and 2 wrong of 6: 5 nodes, 3 accepted. 1/0 draws its own."""
    policy = tiny_policy(num_layers=1)
    requests = make_requests(2, max_tokens=6, stop_token_ids=())
    plain = answers(policy, requests)
    right = plain["0/0"].token_ids
    ahead = np.append(right[:3], (right[3:5] + 1) % 19).astype(np.int32)
    with EmbeddedBackend(check_drafts=True) as backend:
        backend.start(policy, RunAheadDrafter(oracle_for(plain)), budget=FixedBudget(NODES))
        backend.submit([replace(requests[0], prefetched=ahead), requests[1]])
        backend.collect()
        metrics = backend.metrics()
        assert backend.metrics()["spec/run_ahead_accept_rate"] == 0.0, "not reset"
    accepted = 3 + 1 + 5  # 0/0: three ahead, and of two tokens left the oracle's one; 1/0: all but the last
    assert metrics["spec/accepted_run_ahead_frac"] == pytest.approx(3 / accepted)
    assert metrics["spec/run_ahead_accept_rate"] == pytest.approx(3 / 5)
    assert metrics["rollout/passes"] == 2
