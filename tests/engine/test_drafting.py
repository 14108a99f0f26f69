"""The protocol between engine, drafter and budget: who is asked and told what, and when."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from rhymerl.backends.embedded import EmbeddedBackend
from rhymerl.budgets import Budget, FixedBudget, PassOutcome
from rhymerl.drafters import Drafter
from rhymerl.drafts import NOT_DRAFTED, Draft, DraftBatch, DraftSource
from rhymerl.engine.engine import Engine
from rhymerl.testing import OracleDrafter, RandomTreeDrafter, ScriptedBackend, make_requests, tiny_policy
from rhymerl.types import Completion, RolloutRequest
from tests.engine.test_drafts import paths
from tests.engine.test_lossless import answers, assert_same


def oracle_for(plain: dict[str, Completion]) -> OracleDrafter:
    return OracleDrafter({name: completion.token_ids for name, completion in plain.items()})


def step(engine: Engine) -> list[Completion]:
    with engine.forward.ready():
        return engine.step()


def drain(engine: Engine) -> dict[str, Completion]:
    done = {}
    while engine.has_work:
        done.update({completion.request.id: completion for completion in engine.run()})
    return done


# -- the life of a request -----------------------------------------------------------------------------------------


class Listening(RandomTreeDrafter):
    """Writes down what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.started: Counter[str] = Counter()
        self.finished: dict[str, Completion] = {}
        self.heard: dict[str, list[int]] = {}
        self.num_accepted: Counter[str] = Counter()
        self.num_closed = 0

    def propose_batch(self, requests, contexts, budgets):
        assert all(request.id in self.started and request.id not in self.finished for request in requests)
        return super().propose_batch(requests, contexts, budgets)

    def start(self, request):
        self.started[request.id] += 1

    def accept(self, request, token_ids, num_accepted):
        self.heard.setdefault(request.id, []).extend(token_ids.tolist())
        self.num_accepted[request.id] += num_accepted

    def finish(self, completion):
        assert completion.request.id not in self.finished
        self.finished[completion.request.id] = completion

    def close(self):
        self.num_closed += 1


def test_a_request_starts_and_finishes_once_though_it_is_preempted_and_weights_change():
    drafter = Listening()
    engine = Engine(tiny_policy().model, drafter=drafter, max_running=16, kv_tokens=70)
    requests = make_requests(8, group_size=2)
    engine.submit(requests)
    done = {completion.request.id: completion for _ in range(3) for completion in step(engine)}
    engine.new_weights(1)
    done |= drain(engine)
    assert engine.totals.preemptions > 0
    assert drafter.started == Counter(request.id for request in requests)
    assert drafter.finished.keys() == done.keys() == {request.id for request in requests}
    for name, completion in done.items():
        assert drafter.heard[name] == completion.token_ids.tolist()
        assert drafter.num_accepted[name] == completion.num_accepted


class Sourced(RandomTreeDrafter):
    """Names a source for each node that follows from its token."""

    def __init__(self) -> None:
        super().__init__()
        self.expected: dict[str, list[int]] = {}

    def propose_batch(self, requests, contexts, budgets):
        drafts = super().propose_batch(requests, contexts, budgets)
        return replace(drafts, sources=(drafts.token_ids % 7).astype(np.int8))

    def accept(self, request, token_ids, num_accepted):
        drafted, others = token_ids[:num_accepted] % 7, [NOT_DRAFTED] * (len(token_ids) - num_accepted)
        self.expected.setdefault(request.id, []).extend([*drafted.tolist(), *others])


def test_each_token_knows_which_draft_it_was_accepted_from():
    drafter = Sourced()
    engine = Engine(tiny_policy().model, drafter=drafter, max_running=16, kv_tokens=70)
    engine.submit(make_requests(8, group_size=2))
    done = {completion.request.id: completion for _ in range(3) for completion in step(engine)}
    moved = engine.withdraw()
    engine.submit([completion.resume() for completion in moved])
    done |= drain(engine)
    assert engine.totals.preemptions > 0
    assert engine.totals.accepted_nodes > 0
    assert {name: completion.output.sources.tolist() for name, completion in done.items()} == drafter.expected


def test_a_beginning_of_which_nobody_told_the_sources_is_unknown():
    engine = Engine(tiny_policy().model, max_running=2, kv_tokens=4096)
    engine.submit(make_requests(1, max_tokens=6, stop_token_ids=()))
    step(engine)
    (begun,) = engine.withdraw()
    engine.submit([replace(begun.request, output=replace(begun.output, sources=None))])
    (done,) = drain(engine).values()
    assert done.output.sources.tolist() == [DraftSource.UNKNOWN] + [NOT_DRAFTED] * 5


def test_what_is_withdrawn_finishes_if_it_had_started():
    drafter = Listening()
    engine = Engine(tiny_policy().model, drafter=drafter, max_running=2, kv_tokens=4096)
    requests = make_requests(4, max_tokens=30, stop_token_ids=())
    engine.submit(requests)
    step(engine)
    engine.new_weights(1)  # all wait now, of which two have started
    taken = {completion.request.id: completion for completion in engine.withdraw()}
    assert taken.keys() == {request.id for request in requests}
    assert drafter.finished.keys() == drafter.started.keys() == {request.id for request in requests[:2]}
    assert all(drafter.finished[name] is taken[name] for name in drafter.finished)


@pytest.mark.parametrize("backend", [EmbeddedBackend(), ScriptedBackend(lambda request: [])], ids=["own", "scripted"])
def test_closing_the_backend_closes_the_drafter_once(backend):
    drafter = Listening()
    with backend:
        backend.start(tiny_policy(num_layers=1), drafter)
        assert drafter.num_closed == 0
    backend.close()
    assert drafter.num_closed == 1


def test_a_prefix_for_which_nobody_waits_any_more_is_not_computed():
    engine = Engine(tiny_policy(num_layers=1).model, max_pass_tokens=6, kv_tokens=4096)
    engine.submit(make_requests(1, group_size=2, prompt_tokens=(24, 24)))
    step(engine)
    engine.withdraw()
    engine.check_integrity()
    assert engine.kv.pool.num_free == engine.kv.num_slots
    before = engine.totals.fed_tokens
    engine.submit(make_requests(1, prompt_tokens=(3, 3), max_tokens=1))
    drain(engine)
    assert engine.totals.fed_tokens - before == 3


# -- budgets -------------------------------------------------------------------------------------------------------


class Recording(Budget):
    """Gives request number n n nodes, drops every third node, and keeps what it is told."""

    max_nodes = 9

    def __init__(self, *, trims: bool = True, same_for_all: int | None = None) -> None:
        self.trims = trims
        self.same_for_all = same_for_all
        self.outcomes: list[PassOutcome] = []
        self.finished: Counter[str] = Counter()

    def limits(self, requests: Sequence[RolloutRequest]):
        own = [int(request.id.split("/")[0]) for request in requests]
        return np.array(own if self.same_for_all is None else [self.same_for_all] * len(own), np.int32)

    def trim(self, requests, drafts):
        assert len(requests) == len(drafts)
        return (np.arange(len(drafts.token_ids)) % 3 != 0) | (not self.trims)

    def learn(self, outcome):
        assert not any(request.id in self.finished for request in outcome.requests)
        self.outcomes.append(outcome)

    def finish(self, request):
        self.finished[request.id] += 1

    def metrics(self):
        return {"budget/outcomes": float(len(self.outcomes))}


class Skipping(Recording):
    """Leaves the drafter alone in two of three passes."""

    passes = 0

    def count_passes(self, num_passes):
        self.passes += num_passes

    def skips(self, num_requests):
        self.pauses = not getattr(self, "pauses", False)
        return 2 * self.pauses


def test_a_pass_that_is_skipped_asks_nobody_and_is_not_heard_of():
    policy, requests = tiny_policy(), make_requests(5, max_tokens=20)
    plain = answers(policy, requests)
    budget, drafter = Skipping(trims=False), oracle_for(plain)
    assert_same(plain, answers(policy, requests, drafter=drafter, budget=budget))
    assert 2 <= len(budget.outcomes) < 0.6 * budget.passes
    assert any(outcome.accepted.any() for outcome in budget.outcomes)


@pytest.mark.parametrize("trims", [True, False])
@pytest.mark.parametrize("perfect", [True, False])
def test_a_budget_is_kept_to_and_told_what_came_of_it(trims, perfect):
    policy = tiny_policy()
    requests = make_requests(12, max_tokens=20)
    plain = answers(policy, requests)
    drafter, budget = oracle_for(plain) if perfect else RandomTreeDrafter(), Recording(trims=trims)
    assert_same(plain, answers(policy, requests, drafter=drafter, budget=budget, max_running=5))
    assert budget.finished == Counter(plain.keys())
    emitted: Counter[str] = Counter()
    for outcome in budget.outcomes:
        assert len(outcome.requests) == len(outcome.drafts) == len(outcome.num_accepted)
        expected = {"reached": [], "accepted": []}
        for r, request in enumerate(outcome.requests):
            rest = tuple(plain[request.id].token_ids[emitted[request.id] :].tolist())
            tree = paths(outcome.drafts.draft(r))
            assert len(tree) <= min(int(request.id.split("/")[0]), 9)
            assert all(len(path) < request.sampling.max_tokens - emitted[request.id] for path in tree)
            expected["reached"] += [path[:-1] == rest[: len(path) - 1] and len(path) <= len(rest) for path in tree]
            accepted = [path == rest[: len(path)] for path in tree]
            expected["accepted"] += accepted
            assert outcome.num_accepted[r] == sum(accepted)
            emitted[request.id] += min(sum(accepted) + 1, len(rest))
        assert outcome.reached.tolist() == expected["reached"]
        assert outcome.accepted.tolist() == expected["accepted"]
        assert outcome.seconds > 0
    assert emitted == Counter({name: len(completion.token_ids) for name, completion in plain.items()})
    assert any(outcome.accepted.any() for outcome in budget.outcomes) or not perfect or trims


def test_passes_in_which_a_prompt_is_computed_are_marked():
    budget = Recording()
    requests = make_requests(3, prompt_tokens=(9, 9), max_tokens=20, stop_token_ids=())
    engine = Engine(tiny_policy(num_layers=1).model, drafter=RandomTreeDrafter(), budget=budget)
    engine.submit(requests)
    drain(engine)
    assert [outcome.is_decoding for outcome in budget.outcomes] == [False] + [True] * (len(budget.outcomes) - 1)
    assert [outcome.num_rows for outcome in budget.outcomes][:2] == [6, 3]  # at first, three prefixes besides
    assert sum(outcome.num_tokens for outcome in budget.outcomes) == engine.totals.fed_tokens


class Counting(Drafter):
    """Counts what it is asked for, and guesses nothing."""

    def __init__(self) -> None:
        self.budgets: list[int] = []

    def propose(self, request, context, budget):
        self.budgets.append(budget)
        return Draft(token_ids=[], parents=[])


@pytest.mark.parametrize(
    ("settings", "budgets"),
    [
        ({"budget": FixedBudget(5)}, [5] * 7),
        ({"budget": FixedBudget(0)}, []),
        ({"budget": FixedBudget(90), "kv_tokens": 30}, [20, 19, 18, 17, 16, 15, 14]),  # the slots that are free
        ({"budget": FixedBudget(90), "max_pass_tokens": 12}, [2, 11, 11, 11, 11, 11, 11]),  # what the pass has left
        ({}, [16] * 7),
    ],
)
def test_drafts_get_what_is_granted_and_what_there_is_room_for(settings, budgets):
    """Eight tokens for a prompt of ten; for the last of them nothing can be guessed."""
    drafter = Counting()
    engine = Engine(tiny_policy(num_layers=1).model, drafter=drafter, **settings)
    engine.submit(make_requests(1, prompt_tokens=(10, 10), max_tokens=8, stop_token_ids=()))
    drain(engine)
    assert drafter.budgets == budgets


# -- bad drafts ----------------------------------------------------------------------------------------------------


class OneIsBad(OracleDrafter):
    """Right for all, except that one request's draft is no tree."""

    bad = "2/0"

    def propose(self, request, context, budget):
        draft = super().propose(request, context, budget)
        return Draft(token_ids=draft.token_ids, parents=draft.parents + 1) if request.id == self.bad else draft


def test_only_the_offending_request_goes_without():
    policy = tiny_policy(num_layers=1)
    requests = make_requests(5, max_tokens=12, stop_token_ids=())
    plain = answers(policy, requests)
    drafter = OneIsBad(oracle_for(plain).answers)
    with pytest.raises(ValueError, match="OneIsBad proposed a bad draft for request 2/0: a parent that does not come"):
        answers(policy, requests, drafter=drafter)
    done = answers(policy, requests, drafter=drafter, check_drafts=False)
    assert_same(plain, done)
    assert {name: c.num_drafted for name, c in done.items()} == {f"{n}/0": 0 if n == 2 else 11 for n in range(5)}


class Packed(Drafter):
    """A batch of its own making, every field in plain lists: the same two tokens for all."""

    def __init__(self, **wrong) -> None:
        self.wrong = wrong

    def propose(self, request, context, budget):
        raise AssertionError("the batch is asked for")

    def propose_batch(self, requests, contexts, budgets):
        count = len(requests)
        fields = {
            "token_ids": [5, 6] * count,
            "parents": [-1, 0] * count,
            "starts": list(range(0, 2 * count + 1, 2)),
            "scores": [0.5, 0.25] * count,
            "match_length": [0] * count,
            "sources": [-1, -1] * count,
        }
        return DraftBatch(**{**fields, **self.wrong})


def test_a_drafter_may_pack_its_batch_itself():
    policy = tiny_policy(num_layers=1)
    requests = make_requests(5, max_tokens=12)
    done = answers(policy, requests, drafter=Packed())
    assert_same(answers(policy, requests), done)
    assert sum(completion.num_drafted for completion in done.values()) > 0


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ({"starts": [0, 2]}, "starts must rise"),
        ({"starts": [0, 4, 2, 4, 6, 10]}, "starts must rise"),
        ({"parents": [-1]}, "different lengths"),
        ({"token_ids": [5.5] * 10}, "must be integers"),
        ({"match_length": [0]}, "match_length"),
    ],
)
def test_a_batch_that_does_not_fit_together_is_named_or_ignored_and_counted(wrong, problem):
    policy = tiny_policy(num_layers=1)
    requests = make_requests(5, max_tokens=2, stop_token_ids=())
    with pytest.raises(ValueError, match=f"Packed proposed a bad batch of drafts: .*{problem}"):
        answers(policy, requests, drafter=Packed(**wrong))
    engine = Engine(policy.model, drafter=Packed(**wrong), kv_tokens=4096)
    engine.submit(requests)
    assert_same(answers(policy, requests), drain(engine))
    assert engine.totals.bad_drafts == 5


# -- metrics -------------------------------------------------------------------------------------------------------


class SecondIsWrong(OracleDrafter):
    """Two tokens, the first of them right; nothing for request 0/0."""

    def propose(self, request, context, budget):
        right = super().propose(request, context, 2 if request.id != "0/0" else 0)
        return Draft(token_ids=(right.token_ids + np.arange(len(right))) % 19, parents=right.parents)


def test_metrics_by_hand():
    """Request 0/0 draws five tokens one a pass, asked in four of them; 1/0 draws 2, 2 and 1, asked in two."""
    policy = tiny_policy(num_layers=1)
    requests = make_requests(2, max_tokens=5, stop_token_ids=())
    drafter = SecondIsWrong(oracle_for(answers(policy, requests)).answers)
    with EmbeddedBackend() as backend:
        backend.start(policy, drafter, budget=Recording(trims=False, same_for_all=2))
        backend.submit(requests)
        while backend.collect():
            pass
        metrics = backend.metrics()
        assert backend.metrics()["spec/draft_hit_rate"] == 0, "not reset"
    expected = {
        "rollout/passes": 5,
        "rollout/spec_accept_length": 10 / 8,
        "rollout/spec_accept_rate": 2 / 4,
        "spec/accept_rate_pos_1": 2 / 2,
        "spec/accept_rate_pos_2": 0 / 2,
        "spec/accept_rate_pos_3": 0,
        "spec/draft_hit_rate": 2 / 6,
        "spec/bad_drafts": 0,
        "budget/outcomes": 5,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)
    assert 0 < metrics["spec/draft_time_frac"] < 1
