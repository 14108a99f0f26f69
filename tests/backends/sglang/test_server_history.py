"""The trainer's history reaches the drafters of servers that run already."""

from __future__ import annotations

import logging
from contextlib import ExitStack

import pytest

from rhymerl.backends.remote import delivery
from rhymerl.backends.remote.proof import prove_server
from rhymerl.backends.sglang.backend import SGLangBackend
from rhymerl.drafters import HistoryTreeDrafter
from rhymerl.errors import BackendError
from rhymerl.history import HistoryStore
from rhymerl.testing import RandomTreeDrafter, make_prompt, make_requests
from tests.backends.sglang.fake_engine import FakeEngine
from tests.backends.sglang.routes import HistoryEngine
from tests.backends.sglang.test_drafter_feed import answer, sample
from tests.backends.sglang.test_servers import loop_over, run
from tests.backends.sglang.test_session import all_of, connected


@pytest.fixture
def engines(tmp_path):
    with ExitStack() as stack:
        yield [stack.enter_context(HistoryEngine(tmp_path / str(i))) for i in range(2)]


@pytest.fixture
def engine(engines):
    return engines[0]


def answers_of(samples, prompt):
    return [each.completion.token_ids.tolist() for each in samples if each.prompt.key == prompt.key]


def trained(engines, policy, *, steps=3, drafter=None, **settings):
    """Return the samples of each step."""
    with loop_over(engines, policy, drafter=drafter or HistoryTreeDrafter(), **settings) as loop:
        return list(run(loop, policy, range(steps)))


@pytest.mark.parametrize("run_ahead", ["off", "draft"])
def test_past_answers_are_there_before_the_first_request_for_a_prompt(engines, flat_policy, run_ahead):
    steps = trained(engines, flat_policy, run_ahead=run_ahead)
    lags = 1 if run_ahead == "off" else 2  # what runs ahead is asked for before the step before has ended
    for number in range(lags, 3):
        past = steps[: number - lags + 1]
        for each in steps[number]:
            request = each.completion.request
            known = next(engine.before[request.id] for engine in engines if request.id in engine.before)
            expected = [tokens for samples in past for tokens in answers_of(samples, request.prompt)]
            assert known[: len(expected)] == expected
    assert all(engine.before for engine in engines)


def test_nothing_is_told_twice(engines, flat_policy):
    steps = trained(engines, flat_policy)
    for engine in engines:
        for answers in engine.drafter.known.values():
            assert len(answers) in (4, 8), "those of the first steps; the last one's are of no use any more"
        assert engine.drafter.num_snapshots == 1
    assert len(steps) == 3


def test_what_a_server_remembers_is_bounded(engines, flat_policy):
    trained(engines, flat_policy, steps=4, history_tokens=150)
    known = [sum(len(each) for answers in engine.drafter.known.values() for each in answers) for engine in engines]
    assert all(0 < each <= 150 for each in known)


def test_the_next_trainers_history_takes_the_place_of_the_former_ones(engines, flat_policy):
    trained(engines, flat_policy)
    versions = [engine.route._writer.version for engine in engines]
    trained(engines, flat_policy, steps=1)
    for engine, version in zip(engines, versions, strict=True):
        assert version > 1
        assert engine.reader.version == engine.route._writer.version == version + 1
        assert engine.drafter.known == {}


def test_a_server_that_was_started_anew_between_two_steps_is_told_all(engines, flat_policy):
    with loop_over(engines, flat_policy, drafter=HistoryTreeDrafter()) as loop:
        steps = run(loop, flat_policy, range(3))
        first, second = next(steps), next(steps)
        engines[0].start_anew()
        third = next(steps)
    assert engines[0].drafter.num_snapshots == 1
    for each in third:
        request = each.completion.request
        known = next(engine.before[request.id] for engine in engines if request.id in engine.before)
        assert known == answers_of(first, request.prompt) + answers_of(second, request.prompt)


def test_two_trainers_at_once_only_cost_time(engine, flat_policy):
    """A change that meets the other trainer's is followed by all of the history, which requests then ask for."""
    one, two = HistoryStore(), HistoryStore()
    with connected(engine, flat_policy, HistoryTreeDrafter()) as first:
        first.follow(one)
        with connected(engine, flat_policy, HistoryTreeDrafter()) as second:
            two.add(make_prompt([2]), [answer([8])])
            second.follow(two)
            one.add(make_prompt([1]), [answer([3])])
            first.follow(one)
            assert engine.route._writer.version == 4
            first.submit(make_requests(1))
            all_of(first, 1)
            assert list(engine.drafter.known.values()) == [[[3]]]
            one.add(make_prompt([5]), [answer([4])])
            first.follow(one)
            assert engine.route._writer.version == 5, "nobody has come between"


class Learner(RandomTreeDrafter):
    def learn(self, samples):
        raise NotImplementedError("here nobody drafts")


def test_scored_samples_stay_with_the_trainer(engine, flat_policy):
    """Their texts, columns and log-probs would have to travel."""
    with connected(engine, flat_policy, Learner()) as backend:
        backend.learn([sample([7, 8])])
    assert "/rhymerl/feed" in engine.calls
    assert engine.route._writer.version == 0


def test_its_metrics_are_those_of_an_engine_of_our_own(engine, flat_policy):
    engine.counters.add(passes=100, nodes=900, asks=5)  # for others, before
    with connected(engine, flat_policy, nodes=3) as backend:
        engine.counters.add(passes=4, row_passes=8, nodes=16, asks=10, hits=6, bad_drafts=1, draft_s=0.5)
        backend.submit(make_requests(4, max_tokens=9, stop_token_ids=()))
        assert {each.num_drafted for each in all_of(backend, 4).values()} == {12}, "it has not told: as if always 3"
        metrics = backend.metrics()
        assert metrics["budget/nodes_per_pass"] == 4.0
        assert metrics["spec/draft_hit_rate"] == 0.6
        assert (metrics["rollout/passes"], metrics["spec/bad_drafts"]) == (4, 1)
        assert metrics["rollout/spec_accept_rate"] == 1.0  # 16 of 16
        assert metrics["spec/draft_time_frac"] > 0
        backend.submit(make_requests(4, max_tokens=9, stop_token_ids=()))
        assert {each.num_drafted for each in all_of(backend, 4).values()} == {8}, "two in a pass"
        assert backend.metrics()["rollout/passes"] == 0


def test_the_answers_of_the_proof_are_not_counted(engine, flat_policy, monkeypatch):
    def proven(*args):
        prove_server(*args)
        engine.counters.add(passes=20, row_passes=20, nodes=20, asks=20)

    monkeypatch.setattr(delivery, "prove_server", proven)
    with connected(engine, flat_policy, nodes=3) as backend:
        backend.submit(make_requests(4, max_tokens=9, stop_token_ids=()))
        assert {each.num_drafted for each in all_of(backend, 4).values()} == {12}, "no pass of the run: as if always 3"
        engine.counters.add(passes=4, row_passes=8, nodes=16, asks=10, hits=6)
        metrics = backend.metrics()
        assert (metrics["rollout/passes"], metrics["spec/draft_hit_rate"]) == (4, 0.6)


def told(caplog):
    return [each.message for each in caplog.records if each.name == "rhymerl.backends.sglang.served"]


def test_a_server_without_the_route_is_told_of_in_one_line(flat_policy, caplog):
    with FakeEngine() as engine, caplog.at_level(logging.INFO):
        trained([engine], flat_policy)
        (line,) = told(caplog)
        assert "drafts with the drafter that it was started with, and not from this run's history" in line
        assert set(engine.calls) & {"/rhymerl/feed"} == {"/rhymerl/feed"}
        assert engine.calls.count("/rhymerl/feed") == 1


def test_a_server_with_the_route_only_asks_for_its_drafter(engine, flat_policy, caplog):
    with connected(engine, flat_policy, HistoryTreeDrafter()):
        (line,) = told(caplog)
        assert "history, " not in line
        assert line.endswith(
            "drafts with the drafter that it was started with; drafter=HistoryTreeDrafter of this run has to be the same"
        )


@pytest.mark.parametrize(
    ("status", "words"),
    [(401, {"error": "Unauthorized"}), (400, {"error": "history message: truncated"}), (507, "full")],
)
def test_a_refusal_ends_the_run_with_its_words(engine, flat_policy, status, words):
    store = HistoryStore()
    store.add(make_prompt([1]), [answer([3])])
    with connected(engine, flat_policy, HistoryTreeDrafter()) as backend:
        engine.answers["/rhymerl/feed"] = status, words
        with pytest.raises(BackendError, match=rf"refused /rhymerl/feed \(HTTP {status}\): "):
            backend.follow(store)


def test_a_long_history_is_sent_in_several_messages(engine, flat_policy, monkeypatch):
    monkeypatch.setattr("rhymerl.backends.remote.drafter_feed._MESSAGE_TOKENS", 5)
    store = HistoryStore()
    for number in range(4):
        store.add(make_prompt([number]), [answer([number, 7])])
    with connected(engine, flat_policy, HistoryTreeDrafter()) as backend:
        backend.follow(store)
        assert engine.route._writer.version == 4, "three tokens each"
        backend.submit(make_requests(1))
        all_of(backend, 1)
        assert list(engine.drafter.known.values()) == [[[number, 7]] for number in range(4)]
        backend.follow(store)
        assert engine.route._writer.version == 5


@pytest.mark.parametrize("page", ["<html>gone</html>", ["version"], {"version": "1"}, {"counters": 3}])
def test_a_page_in_the_place_of_the_route_is_none_of_it(engine, flat_policy, page):
    engine.answers["/rhymerl/feed"] = 200, page
    with connected(engine, flat_policy, HistoryTreeDrafter()) as backend:
        backend.follow(HistoryStore())
        assert engine.calls.count("/rhymerl/feed") == 1


def test_a_route_that_answers_something_else_later_is_an_error(engine, flat_policy):
    with connected(engine, flat_policy, HistoryTreeDrafter()) as backend:
        engine.answers["/rhymerl/feed"] = 200, {"version": None}
        with pytest.raises(BackendError, match=r"at http://.* answered /rhymerl/feed with what is not rhymerl's: "):
            backend.follow(HistoryStore())


def test_more_than_can_be_sent_at_once_is_told(engine, flat_policy, monkeypatch):
    monkeypatch.setattr("rhymerl.backends.sglang.served.LARGEST_BYTES", 100)
    with (
        connected(engine, flat_policy, HistoryTreeDrafter()) as backend,
        pytest.raises(BackendError, match=r"bytes of history for http://.*: at most 100 can be sent at once"),
    ):
        backend.follow(HistoryStore())


def test_a_bound_without_servers_is_refused():
    with pytest.raises(ValueError, match=r"^history_tokens=9: is for servers that run already, at `url`"):
        SGLangBackend(history_tokens=9)
