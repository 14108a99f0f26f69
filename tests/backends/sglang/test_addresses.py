"""Addresses of servers that run already: their own ones, or a router's."""

from __future__ import annotations

import contextlib

import pytest

from rhymerl.backends.remote.addresses import engines_at
from rhymerl.backends.remote.client import Client
from rhymerl.backends.sglang.backend import SGLangBackend
from rhymerl.drafters import NoDrafter
from rhymerl.errors import BackendError, ConfigError
from tests.backends.sglang.fake_engine import FakeEngine
from tests.backends.sglang.test_servers import loop_over, run


@pytest.fixture
def engines():
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(FakeEngine()) for _ in range(3)]


def test_several_are_no_single_engine(engines, flat_policy):
    backend = SGLangBackend(url=[each.url for each in engines])
    with pytest.raises(ConfigError, match=r"several servers are workers"):
        backend.start(flat_policy, NoDrafter())


def test_nobody_is_there_twice(engines):
    one = engines[0].url
    with pytest.raises(
        ConfigError, match=rf"backend\.url: expected each SGLang server once; {one} is there more often"
    ):
        engines_at([Client.at(one), Client.at(f"{one}/")])


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
    with loop_over([router], flat_policy) as loop:
        assert len(loop.workers.handles) == 2
        for _ in run(loop, flat_policy, range(2)):
            pass
    assert set(router.calls) == ({"/workers", "/list_workers"} if is_old else {"/workers"})
    assert [len(engine.inputs) for engine in behind] == [24, 24]


def test_a_router_that_cannot_help_is_refused(engines):
    router, engine, _ = engines
    address = Client.at(router.url)
    router.answers["/workers"] = 200, {"workers": []}
    with pytest.raises(BackendError, match=r"backend\.url='http://.*': the router there has no SGLang servers yet"):
        engines_at([address])
    router.answers["/workers"] = 200, {"workers": [listed(engine.url, "prefill")]}
    with pytest.raises(ConfigError, match=rf"backend\.url='http://.*': expected .*{engine.url} is for prefill only"):
        engines_at([address])
    router.answers["/workers"] = 200, {"workers": [listed("grpc://127.0.0.1:1")]}
    with pytest.raises(ConfigError, match=r"'grpc://127\.0\.0\.1:1': expected http://HOST:PORT"):
        engines_at([address])
    router.vanish()
    with pytest.raises(BackendError, match="did not answer /workers"):
        engines_at([address])
