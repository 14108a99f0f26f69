"""The backend at an engine that runs already: requests there and back, taken back, sent on under new weights."""

from __future__ import annotations

import contextlib
import math
import os
import random
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rhymerl.backends.remote.in_flight import InFlightRequests
from rhymerl.backends.sglang import backend as backend_module
from rhymerl.backends.sglang.backend import SGLangBackend
from rhymerl.drafters import NoDrafter
from rhymerl.errors import BackendError
from rhymerl.history import HistoryStore
from rhymerl.testing import RandomTreeDrafter, make_requests
from rhymerl.types import Output
from tests.backends.sglang.fake_engine import LOGPROB, answer_of


@contextlib.contextmanager
def connected(engine, policy, drafter=None, **settings):
    """The backend with weights of version 0 in the engine."""
    with SGLangBackend(url=engine.url, **{"max_running": 4, **settings}) as backend:
        backend.start(policy, drafter or RandomTreeDrafter())
        synced(backend, policy, 0)
        yield backend


def synced(backend, policy, version):
    backend.sync_weights(policy.model.named_parameters(), version)


def all_of(backend, count):
    done = {}
    while len(done) < count:
        found = backend.collect()
        assert found, "the backend lost requests"
        assert not {each.request.id for each in found} & done.keys(), "an answer came twice"
        done.update((each.request.id, each) for each in found)
    return done


def soon(condition):
    deadline = time.monotonic() + 100
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.002)


def assert_whole(completions, requests):
    """Every request's own answer, whatever happened on the way."""
    assert completions.keys() == {request.id for request in requests}
    for request in requests:
        done = completions[request.id]
        assert done.token_ids.tolist() == answer_of(request)
        assert done.finish_reason == ("stop" if done.token_ids[-1] in request.sampling.stop_token_ids else "length")
        assert done.logprobs == pytest.approx(LOGPROB)


def test_answers_come_back_whole(engine, flat_policy):
    requests = make_requests(6, group_size=4)
    with connected(engine, flat_policy) as backend:
        backend.submit(requests)
        done = all_of(backend, len(requests))
        assert backend.collect() == []
        assert_whole(done, requests)
        assert {each.finish_reason for each in done.values()} == {"stop", "length"}
        assert all((each.output.policy_versions == 0).all() for each in done.values())
        inputs = {tuple(each) for each in engine.inputs.values()}
        assert {tuple(request.prompt.token_ids.tolist()) for request in requests} == inputs


def test_passes_and_drafts_are_counted(engine, flat_policy):
    requests = make_requests(4, max_tokens=9, stop_token_ids=())
    with connected(engine, flat_policy, nodes=3) as backend:
        backend.submit(requests)
        for done in all_of(backend, 4).values():
            assert (done.num_passes, done.num_drafted, done.num_accepted) == (5, 12, 4)
        assert backend.metrics() == {"rollout/spec_accept_length": 9 / 5, "rollout/spec_accept_rate": 4 / 12}
    with connected(engine, flat_policy, NoDrafter()) as backend:
        backend.submit(requests)
        for done in all_of(backend, 4).values():
            assert (done.num_passes, done.num_drafted, done.num_accepted) == (9, 0, 0)


@pytest.mark.parametrize(("timeout_s", "waits"), [(0, [0]), (0.125, [0.125]), (0.5, [0.2, 0.2, 0.1])])
def test_collecting_gives_up_when_its_time_is_over(engine, flat_policy, monkeypatch, timeout_s, waits):
    """In waits of at most 0.2 s, by a clock that only these move."""
    engine.holds_at, waited = 0, list[float]()
    with connected(engine, flat_policy) as backend, monkeypatch.context() as patched:
        backend.submit(make_requests(2))
        patched.setattr(backend_module, "time", SimpleNamespace(monotonic=lambda: math.fsum(waited)))
        patched.setattr(InFlightRequests, "wait", lambda self, timeout_s: waited.append(timeout_s) or [])
        assert backend.collect(timeout_s) == []
    assert waited == pytest.approx(waits)


def test_requests_are_taken_back_wherever_they_are(engine, flat_policy):
    """Running, waiting in the engine, and here: 4 run, 16 are with the engine at a time."""
    engine.holds_at = 3
    requests = make_requests(24, max_tokens=30, stop_token_ids=())
    with connected(engine, flat_policy) as backend:
        backend.submit(requests)
        soon(lambda: len(engine.waiting) == 12 and sum(position == 2 for _, position, _ in engine.sampled) == 4)
        back = backend.withdraw([requests[0].id, requests[-1].id, "nobody"])
        assert [each.request.id for each in back] == [requests[0].id, requests[-1].id]
        back += backend.withdraw()
        assert backend.withdraw() == backend.collect() == []
        assert sorted(len(each.token_ids) for each in back)[-4:] == [3] * 4
        assert {each.finish_reason for each in back} == {"withdrawn"}
        for each in back:
            assert each.token_ids.tolist() == answer_of(each.request)[: len(each.token_ids)]
        assert not engine.running | engine.waiting
        engine.go.set()
        backend.submit([each.resume() for each in back])
        assert_whole(all_of(backend, 24), requests)


def test_what_has_ended_before_it_is_taken_back_comes_back_as_it_ended(engine, flat_policy):
    requests = make_requests(3)
    with connected(engine, flat_policy) as backend:
        backend.submit(requests)
        soon(lambda: len(engine.inputs) == 3 and not engine.running | engine.waiting)
        time.sleep(0.05)
        assert_whole({each.request.id: each for each in backend.withdraw()}, requests)
        assert backend.collect() == []


@pytest.mark.parametrize("is_late", [False, True])
def test_an_update_goes_through_answers_in_flight(engine, flat_policy, is_late):
    """Each token carries the version of the weights that drew it."""
    engine.holds_at, engine.is_late = 4, is_late
    requests = make_requests(24, max_tokens=11)
    with connected(engine, flat_policy) as backend:
        backend.submit(requests)
        soon(lambda: sum(position == 3 for _, position, _ in engine.sampled) == 4)
        synced(backend, flat_policy, 1)
        engine.go.set()
        done = all_of(backend, len(requests))
    assert_whole(done, requests)
    sampled_by = {(seed, position): int(version) for seed, position, version in engine.sampled}
    for request in requests:
        versions = done[request.id].output.policy_versions.tolist()
        assert versions == [sampled_by[request.seed, position] for position in range(len(versions))]
    assert {0, 1} in [set(each.output.policy_versions.tolist()) for each in done.values()]


def test_what_ended_before_an_update_is_collected_or_taken_back_after_it(engine, flat_policy):
    requests = make_requests(6, max_tokens=5)
    with connected(engine, flat_policy) as backend:
        backend.submit(requests)
        soon(lambda: len(engine.inputs) == 6 and not engine.running | engine.waiting)
        time.sleep(0.05)
        synced(backend, flat_policy, 1)
        back = backend.withdraw([requests[0].id])
        done = {each.request.id: each for each in [*back, *backend.collect()]}
        assert [each.request.id for each in back] == [requests[0].id]
        assert_whole(done, requests)
        assert all((each.output.policy_versions == 0).all() for each in done.values())
        backend.submit(requests)
        soon(lambda: len(engine.inputs) == 12 and not engine.running | engine.waiting)
        synced(backend, flat_policy, 2)
        assert len(backend.withdraw()) == 6
        assert backend.collect() == []


@pytest.mark.parametrize("is_late", [False, True])
def test_whatever_is_done_meanwhile_answers_are_the_same(engine, flat_policy, is_late):
    """Tokens at a millisecond each, and requests taken back and updates at any time."""
    engine.token_s, engine.is_late = 0.001, is_late
    source = random.Random(int(is_late))
    requests = make_requests(100, max_tokens=25)
    done, version = {}, 0
    with connected(engine, flat_policy, max_running=2) as backend:
        backend.submit(requests)
        while len(done) < len(requests):
            time.sleep(source.random() * 0.02)
            match source.randrange(4):
                case 0:
                    version += 1
                    synced(backend, flat_policy, version)
                case 1:
                    names = {each.id for each in source.sample(requests, 9)}
                    back = backend.withdraw(names)
                    assert {each.request.id for each in back} == names - done.keys()
                    done.update((each.request.id, each) for each in back if each.finish_reason != "withdrawn")
                    backend.submit([each.resume() for each in back if each.finish_reason == "withdrawn"])
                case _:
                    found = backend.collect(timeout_s=0.01)
                    assert not {each.request.id for each in found} & done.keys(), "an answer came twice"
                    done.update((each.request.id, each) for each in found)
        assert backend.collect() == []
    assert_whole(done, requests)
    assert all((np.diff(each.output.policy_versions) >= 0).all() for each in done.values())


def test_the_same_version_again_is_no_update(engine, flat_policy):
    with connected(engine, flat_policy) as backend:
        before = list(engine.calls)
        synced(backend, flat_policy, 0)
        assert engine.calls == before


def test_two_trainers_at_one_engine(engine, flat_policy):
    engine.holds_at = 2
    requests = make_requests(2, max_tokens=9)
    with connected(engine, flat_policy) as one, connected(engine, flat_policy) as other:
        one.submit(requests)
        other.submit(requests)
        soon(lambda: len(engine.running) == 4)
        assert len(one.withdraw()) == 2
        soon(lambda: len(engine.running) == 2)
        engine.go.set()
        assert_whole(all_of(other, 2), requests)


def test_an_engine_that_is_left_is_left_without_requests(engine, flat_policy):
    engine.holds_at = 2
    with connected(engine, flat_policy) as backend:
        backend.submit(make_requests(20))
        soon(lambda: len(engine.running) == 4)
    assert not engine.running | engine.waiting


def test_an_engine_that_gives_nothing_back_is_left_all_the_same(engine, flat_policy, monkeypatch):
    """Nobody waits for it any more, no thread does."""
    monkeypatch.setattr("rhymerl.backends.sglang.backend._PARTING_S", 0.2)
    engine.holds_at, engine.answers["/abort_request"] = 2, (200, "")
    with connected(engine, flat_policy, silence_timeout_s=1e5) as backend:
        backend.submit(make_requests(20))
        soon(lambda: len(engine.running) == 4)
    soon(lambda: not [each for each in threading.enumerate() if each.name.startswith("rhymerl-engine")])


def test_memory_comes_back_before_it_is_needed(engine, flat_policy):
    with connected(engine, flat_policy, release_memory=True) as backend:
        for version in (1, 1):  # a step without an update needs its memory as well
            backend.sleep()
            backend.sleep()
            assert engine.calls[-1] == "/release_memory_occupation"
            synced(backend, flat_policy, version)
        kinds = [each for each in engine.calls if "memory" in each]
        assert kinds == ["/release_memory_occupation", "/resume_memory_occupation"] * 2
        backend.submit(make_requests(2))
        backend.sleep()  # not while something is in flight
        assert len(all_of(backend, 2)) == 2


def test_on_a_gpu_the_update_gives_its_memory_back_before_the_engine_wakes(engine, flat_policy, monkeypatch):
    with connected(engine, flat_policy, release_memory=True) as backend:
        backend.sleep()
        monkeypatch.setattr(type(flat_policy.model), "device", torch.device("cuda"))
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: engine.calls.append("empty_cache"))
        backend._delivery.wake_up()
        assert [each for each in engine.calls if "memory" in each or "cache" in each][-3:] == [
            "/release_memory_occupation",
            "empty_cache",
            "/resume_memory_occupation",
        ]


def test_a_server_that_is_left_has_its_memory_again(engine, flat_policy):
    with connected(engine, flat_policy, release_memory=True) as backend:
        backend.sleep()
    assert [each for each in engine.calls if "memory" in each][-1] == "/resume_memory_occupation"


def test_nothing_is_rested_when_it_is_not_asked_for(engine, flat_policy):
    with connected(engine, flat_policy) as backend:
        backend.sleep()
    assert not [each for each in engine.calls if "memory" in each]


def test_before_its_start_and_after_its_end_there_is_no_engine(engine, flat_policy):
    backend = SGLangBackend(url=engine.url)
    uses = (backend.collect, backend.words, lambda: backend.sync_weights([], 1), lambda: backend.follow(HistoryStore()))
    for use in uses:
        with pytest.raises(BackendError, match="has not been started"):
            use()
    backend.close()
    backend.start(flat_policy, NoDrafter())
    folder, weights = backend.own_folder, backend.weights_folder
    assert weights.is_dir()
    backend.close()
    backend.close()
    assert not folder.exists()
    assert not weights.exists()
    for use in (*uses, lambda: backend.submit([])):
        with pytest.raises(BackendError, match="has not been started"):
            use()


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no shared memory")
@pytest.mark.parametrize("given", [False, True])
def test_its_folders_are_made_for_this_user_alone(given, tmp_path, engine, flat_policy):
    """Nobody can be there before it: what is in shared memory has a name that nobody knows in advance."""
    tmp_path.chmod(0o777)
    with connected(engine, flat_policy, folder=str(tmp_path) if given else None) as backend:
        folder, weights = backend.own_folder, backend.weights_folder
        for each in (folder, weights):
            assert each.stat().st_mode & 0o777 == 0o700
            assert each.stat().st_uid == os.geteuid()
        assert weights.parent == (folder if given else Path("/dev/shm"))
        assert given or (weights.name.startswith(folder.name) and weights.name != folder.name)


def test_progress_is_what_requests_were_sent_with(engine, flat_policy):
    engine.holds_at = 3
    requests = make_requests(2, max_tokens=9, stop_token_ids=())
    with connected(engine, flat_policy) as backend:
        backend.submit(requests)
        assert list(backend.progress().items()) == [("0/0", 0), ("1/0", 0)]
        soon(lambda: len(engine.sampled) == 6)
        synced(backend, flat_policy, 1)
        assert backend.progress() == {"0/0": 3, "1/0": 3}
        engine.go.set()
        all_of(backend, 2)
        assert backend.progress() == {}


def test_passes_are_not_counted(engine, flat_policy):
    with connected(engine, flat_policy) as backend:
        assert not backend.counts_passes
        with pytest.raises(ValueError, match="max_passes=3"):
            backend.collect(max_passes=3)


def test_what_a_request_took_before_its_first_token_counts(engine, flat_policy):
    """It was withdrawn from another worker with nothing sampled yet."""
    nothing = np.empty(0, np.int32)
    before = Output(token_ids=nothing, logprobs=np.empty(0), policy_versions=nothing, num_drafted=5)
    request = replace(make_requests(1)[0], output=before)
    with connected(engine, flat_policy, NoDrafter()) as backend:
        backend.submit([request])
        assert all_of(backend, 1)[request.id].output.num_drafted == 5
