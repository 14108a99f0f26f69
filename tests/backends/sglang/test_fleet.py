"""Several engines that run already, behind addresses of their own or a router: whichever answers, the answer is the same."""

from __future__ import annotations

import contextlib
import random
import time
from collections import Counter

import pytest

from rhymerl.backends.remote.client import Client
from rhymerl.backends.remote.fleet import Fleet
from rhymerl.backends.sglang.backend import SGLangBackend
from rhymerl.errors import BackendError, ConfigError
from rhymerl.testing import RandomTreeDrafter, make_requests
from tests.backends.sglang.fake_engine import FakeEngine
from tests.backends.sglang.test_session import all_of, assert_whole, soon, synced


@pytest.fixture
def engines():
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(FakeEngine()) for _ in range(3)]


@contextlib.contextmanager
def connected(engines, policy, **settings):
    with SGLangBackend(url=[each.url for each in engines], **{"max_running": 4, **settings}) as backend:
        backend.start(policy, RandomTreeDrafter())
        synced(backend, policy, 0)
        yield backend


def asked(engine):
    """Return how many requests it has had of each prompt."""
    return Counter(map(tuple, engine.inputs.values()))


def test_siblings_go_together_and_prompts_to_whoever_has_least(engines, flat_policy):
    for engine in engines:
        engine.holds_at = 0
    requests = make_requests(6, group_size=4)
    with connected(engines, flat_policy, max_running=8) as backend:
        backend.submit(requests)
        soon(lambda: sum(len(each.running | each.waiting) for each in engines) == 24)
        groups = [asked(engine) for engine in engines]
        assert [len(each) for each in groups] == [2, 2, 2]
        assert all(count == 4 for each in groups for count in each.values())
        for engine in engines:
            engine.go.set()
        assert_whole(all_of(backend, 24), requests)


def test_all_of_them_have_the_new_weights_before_requests_go_on(engines, flat_policy):
    for engine in engines:
        engine.holds_at = 4
    requests = make_requests(24, max_tokens=11)
    with connected(engines, flat_policy) as backend:
        backend.submit(requests)
        soon(lambda: all(sum(index == 3 for _, index, _ in each.sampled) == 4 for each in engines))
        synced(backend, flat_policy, 1)
        assert [each.version for each in engines] == ["1"] * 3
        for engine in engines:
            engine.go.set()
        done = all_of(backend, 24)
    assert_whole(done, requests)
    sampled_by = {(seed, index): int(version) for each in engines for seed, index, version in each.sampled}
    for request in requests:
        versions = done[request.id].output.policy_versions.tolist()
        assert versions == [sampled_by[request.seed, index] for index in range(len(versions))]


def test_whatever_is_done_meanwhile_answers_are_the_same(engines, flat_policy):
    source = random.Random(0)
    for engine in engines:
        engine.token_s = 0.001
    requests = make_requests(30, group_size=3, max_tokens=25)
    done, version = {}, 0
    with connected(engines, flat_policy, max_running=2) as backend:
        backend.submit(requests)
        while len(done) < len(requests):
            time.sleep(source.random() * 0.02)
            match source.randrange(3):
                case 0:
                    version += 1
                    synced(backend, flat_policy, version)
                case 1:
                    back = backend.withdraw({each.id for each in source.sample(requests, 9)})
                    done.update((each.request.id, each) for each in back if each.finish_reason != "withdrawn")
                    backend.submit([each.resume() for each in back if each.finish_reason == "withdrawn"])
                case _:
                    done.update((each.request.id, each) for each in backend.collect(timeout_s=0.01))
        lines = backend.session._in_flight.connections
        assert [(line.num_in_flight, dict(line.prompts)) for line in lines] == [(0, {})] * 3
    assert_whole(done, requests)
    assert all(asked(engine) for engine in engines)


@pytest.mark.parametrize("path", ["/update_weights_from_disk", "/flush_cache"])
def test_one_that_refuses_is_enough_to_fail(engines, flat_policy, path, monkeypatch):
    monkeypatch.setattr("rhymerl.backends.remote.weights._SETTLE_S", 0.2)
    with connected(engines, flat_policy) as backend:
        engines[1].answers[path] = 400, {"success": False, "message": "no room"}
        with pytest.raises(BackendError, match=rf"refused {path} \(HTTP 400\): .*no room"):
            synced(backend, flat_policy, 1)


def test_one_that_computes_something_else_is_found_out(engines, flat_policy):
    engines[2].meta = {"output_token_logprobs": [[-1.0, 5, None]] * 8}
    with pytest.raises(BackendError, match="does not compute the policy"), connected(engines, flat_policy):
        pass


def test_nobody_is_there_twice(engines):
    one = engines[0].url
    with pytest.raises(
        ConfigError, match=rf"backend\.url: expected each SGLang server once; {one} is there more often"
    ):
        Fleet.at([Client.at(one), Client.at(f"{one}/")])


def listed(url, kind="regular"):
    """An engine as routers from 0.2.2 on tell of it."""
    return {"id": "532b2fda", "url": url, "worker_type": kind, "is_healthy": True, "connection_mode": "HTTP", "load": 0}


@pytest.mark.parametrize("is_old", [False, True])
def test_a_router_is_asked_for_its_engines(engines, flat_policy, is_old):
    """It is not asked for answers: it would drop what it does not know of a request, the seed among it."""
    router, *behind = engines
    urls = [each.url for each in behind]
    if is_old:
        router.answers["/list_workers"] = 200, {"urls": urls[::-1]}
    else:
        router.answers["/workers"] = 200, {"workers": [listed(url) for url in [*urls, f"{urls[0]}/", f"{urls[1]}@1"]]}
    requests = make_requests(8, group_size=2)
    with connected([router], flat_policy) as backend:
        assert [each.url for each in backend.session.fleet.engines] == sorted(urls)
        backend.submit(requests)
        assert_whole(all_of(backend, 16), requests)
    assert set(router.calls) == ({"/workers", "/list_workers"} if is_old else {"/workers"})
    assert all(asked(engine) for engine in behind)


def test_a_router_that_cannot_help_is_refused(engines):
    router, engine, _ = engines
    address = Client.at(router.url)
    router.answers["/workers"] = 200, {"workers": []}
    with pytest.raises(BackendError, match=r"backend\.url='http://.*': the router there has no SGLang servers yet"):
        Fleet.at([address])
    router.answers["/workers"] = 200, {"workers": [listed(engine.url, "prefill")]}
    with pytest.raises(ConfigError, match=rf"backend\.url='http://.*': expected .*{engine.url} is for prefill only"):
        Fleet.at([address])
    router.answers["/workers"] = 200, {"workers": [listed("grpc://127.0.0.1:1")]}
    with pytest.raises(ConfigError, match=r"'grpc://127\.0\.0\.1:1': expected http://HOST:PORT"):
        Fleet.at([address])
    router.vanish()
    with pytest.raises(BackendError, match="did not answer /workers"):
        Fleet.at([address])
