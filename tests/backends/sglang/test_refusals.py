"""An engine that refuses, fails or vanishes is an error that says what."""

from __future__ import annotations

import time

import pytest

from rhymerl.backends.remote import weights
from rhymerl.backends.remote.client import Client
from rhymerl.backends.sglang.backend import SGLangBackend
from rhymerl.drafters import NoDrafter
from rhymerl.errors import BackendError, ConfigError
from rhymerl.testing import RandomTreeDrafter, make_requests
from tests.backends.sglang.fake_engine import FakeEngine
from tests.backends.sglang.test_session import all_of, connected, soon, synced

FAILED = {"success": False, "message": "no room"}


@pytest.mark.parametrize("status", [200, 400])
@pytest.mark.parametrize(
    ("path", "settings"),
    [
        ("/update_weights_from_disk", {}),
        ("/flush_cache", {}),
        ("/begin_weight_update", {"weights": "tensor"}),
        ("/update_weights_from_tensor", {"weights": "tensor"}),
        ("/end_weight_update", {"weights": "tensor"}),
    ],
)
def test_weights_that_are_refused(engine, flat_policy, path, settings, status, monkeypatch):
    monkeypatch.setattr(weights, "_SETTLE_S", 0.2)  # for which a refused flush is tried again
    engine.answers |= {each: (200, {"success": True}) for each in ("/begin_weight_update", "/end_weight_update")}
    with connected(engine, flat_policy, **settings) as backend:
        engine.answers[path] = status, FAILED
        with pytest.raises(BackendError, match=rf"refused {path} \(HTTP {status}\): .*no room"):
            synced(backend, flat_policy, 1)
        assert backend.version == 0


@pytest.mark.parametrize("knows_sessions", [False, True])
def test_an_update_has_a_beginning_and_an_end_where_the_engine_knows_of_them(engine, flat_policy, knows_sessions):
    if knows_sessions:
        engine.answers |= {each: (200, {"success": True}) for each in ("/begin_weight_update", "/end_weight_update")}
    with connected(engine, flat_policy, weights="tensor"):
        updates = [each for each in engine.calls if "weight" in each]
    assert updates[0] == "/begin_weight_update"
    assert updates[1] == "/update_weights_from_tensor"
    assert updates[2:] == (["/end_weight_update"] if knows_sessions else [])


def test_an_update_that_a_trainer_left_open_is_ended(engine, flat_policy):
    """A trainer that was killed leaves one, at a server that goes on."""
    opened = []

    def begin(content):
        opened.append("/end_weight_update" in engine.calls)
        return (200, {"success": True}) if opened[-1] else (400, {"success": False, "message": "already open"})

    engine.on_begin_weight_update, engine.on_end_weight_update = begin, lambda content: (200, {"success": True})
    with connected(engine, flat_policy, weights="tensor") as backend:
        assert opened == [False, True]
        assert backend.version == 0


def test_an_engine_that_computes_something_else_is_found_out(engine, flat_policy):
    engine.meta = {"output_token_logprobs": [[-1.0, 5, None]] * 8}
    with pytest.raises(BackendError, match="does not compute the policy"), connected(engine, flat_policy):
        pass


@pytest.mark.parametrize(("drafter", "refuses"), [(RandomTreeDrafter(), True), (NoDrafter(), False)])
def test_an_engine_with_a_draw_of_its_own_is_told(engine, flat_policy, caplog, drafter, refuses):
    """Its answers do not follow from seeds; its verification of drafts knows nothing of min-p."""
    engine.has_own_draw = True
    request = make_requests(1, min_p=0.1)[0]
    with connected(engine, flat_policy, drafter) as backend:
        assert "draws tokens by its own rule" in caplog.text
        if refuses:
            with pytest.raises(
                ConfigError, match=r"^rollout\.min_p=0\.1: expected 0; this SGLang verifies drafts without it"
            ):
                backend.submit([request])
        else:
            backend.submit([request])
            assert len(backend.collect()) == 1


def test_an_engine_with_our_draw_is_not_warned_of(engine, flat_policy, caplog):
    with connected(engine, flat_policy) as backend:
        backend.submit([make_requests(1, min_p=0.1)[0]])
        assert len(backend.collect()) == 1
    assert "draws" not in caplog.text


@pytest.mark.parametrize("status", [200, 400])
def test_a_request_that_is_refused(engine, flat_policy, status):
    with connected(engine, flat_policy) as backend:
        engine.answers["/generate"] = status, {"success": False, "error": {"message": "too long"}}
        backend.submit(make_requests(2))
        with pytest.raises(BackendError, match=r"refused /generate .*too long"):
            backend.collect()


def test_a_request_that_the_engine_gives_up_by_itself(engine, flat_policy):
    with connected(engine, flat_policy) as backend:
        engine.meta = {"finish_reason": {"type": "abort", "message": "out of memory"}}
        request = make_requests(1)[0]
        backend.submit([request])
        with pytest.raises(BackendError, match=rf"gave up request {request.id}: .*out of memory"):
            backend.collect()


@pytest.mark.parametrize("logprob", [None, float("nan"), float("-inf")])
def test_logprobs_that_are_not_finite(engine, flat_policy, logprob):
    with connected(engine, flat_policy) as backend:
        engine.meta = {"output_token_logprobs": [[-1.0, 5, None], [logprob, 5, None]]}
        backend.submit(make_requests(1))
        with pytest.raises(BackendError, match=r"not finite \(policy version 0\)"):
            backend.collect()


@pytest.mark.parametrize("what", ["collect", "withdraw", "sync"])
def test_an_engine_that_vanishes(engine, flat_policy, what):
    engine.holds_at = 1
    with connected(engine, flat_policy, silence_timeout_s=1e5) as backend:
        backend.submit(make_requests(20))
        soon(lambda: len(engine.running) == 4)
        engine.vanish()
        act = {
            "collect": backend.collect,
            "withdraw": backend.withdraw,
            "sync": lambda: synced(backend, flat_policy, 1),
        }
        with pytest.raises(BackendError, match=r"the SGLang engine at http://127\.0\.0\.1:\d+ did not answer /"):
            act[what]()


def test_an_engine_that_gives_nothing_back(engine, flat_policy):
    engine.holds_at, engine.answers["/abort_request"] = 1, (200, "")
    with connected(engine, flat_policy, silence_timeout_s=1) as backend:
        backend.submit(make_requests(20))
        with pytest.raises(
            BackendError, match=r"backend\.silence_timeout_s=1: an SGLang engine has not given requests back"
        ):
            backend.withdraw()
        engine.go.set()


def test_an_engine_that_fails_its_health_check(engine, flat_policy):
    engine.holds_at = 1
    with connected(engine, flat_policy, silence_timeout_s=1) as backend:
        backend.submit(make_requests(4))
        assert backend.collect(timeout_s=1.5) == []  # it is well, and takes its time
        engine.answers["/health_generate"] = 503, ""
        with pytest.raises(
            BackendError, match=r"backend\.silence_timeout_s=1: no answer .* refused /health_generate \(HTTP 503\)"
        ):
            backend.collect(timeout_s=5)
        engine.go.set()


def test_what_was_collected_before_an_error_is_not_lost(engine, flat_policy):
    good, bad = make_requests(2, seed=4)
    with connected(engine, flat_policy) as backend:
        backend.submit([good])
        soon(lambda: len(engine.inputs) == 1 and not engine.running)
        engine.answers["/generate"] = 400, FAILED
        backend.submit([bad])
        time.sleep(0.2)
        with pytest.raises(BackendError, match="refused /generate"):
            backend.collect()
        assert [each.request.id for each in backend.collect()] == [good.id]


def test_answers_behind_one_that_is_refused_are_not_forgotten(engine, flat_policy):
    """Drained together with it, they are completed as well."""
    requests = make_requests(6, seed=4)
    with connected(engine, flat_policy) as backend:
        engine.meta = {"finish_reason": {"type": "abort", "message": "out of memory"}}
        backend.submit(requests[:1])
        soon(lambda: len(engine.inputs) == 1 and not engine.running)
        engine.meta = {}
        backend.submit(requests[1:])
        soon(lambda: len(engine.inputs) == 6 and not engine.running | engine.waiting)
        time.sleep(0.2)
        with pytest.raises(BackendError, match="gave up request 0/0"):
            backend.collect()
        assert len(backend.collect()) == 5
        assert backend.collect() == []


def test_weights_of_somebody_else_are_noticed(engine, flat_policy):
    """This happens when a server was started anew behind its address."""
    with connected(engine, flat_policy) as backend:
        engine.version = "default"
        backend.submit(make_requests(1))
        with pytest.raises(
            BackendError, match=r"at http://.* with weights of version default, expected 0: it was started anew"
        ):
            backend.collect()


def test_a_folder_that_the_engine_does_not_see_is_named(engine, flat_policy, tmp_path):
    engine.answers["/update_weights_from_disk"] = 400, {"success": False, "message": "Name or service not known"}
    with (
        pytest.raises(BackendError, match=rf"at http://.* refused .*; does it see {tmp_path}/.*backend\.folder"),
        connected(engine, flat_policy, folder=str(tmp_path)),
    ):
        pass


def test_a_folder_that_cannot_be_written_to_is_named(engine, flat_policy, tmp_path):
    with connected(engine, flat_policy, folder=str(tmp_path)) as backend:
        (backend.weights_folder / "model.safetensors").mkdir()
        with pytest.raises(BackendError, match=rf"backend\.folder: weights cannot be written to {tmp_path}/"):
            synced(backend, flat_policy, 1)
        (backend.weights_folder / "model.safetensors").rmdir()


def test_too_many_connections_are_refused_by_name(engine, flat_policy, monkeypatch):
    wanted = []
    monkeypatch.setattr("resource.getrlimit", lambda kind: (256, 4096))
    monkeypatch.setattr("resource.setrlimit", lambda kind, limits: wanted.append(limits))
    with connected(engine, flat_policy, max_running=100):
        assert wanted == [(912, 4096)]
    with (
        pytest.raises(ConfigError, match=r"backend\.max_running: needs 4512 open files .* may have 4096"),
        connected(engine, flat_policy, max_running=1000),
    ):
        pass


def test_an_address_that_is_no_server_is_named(engine, flat_policy):
    engine.answers["/health"] = 404, "Not Found"
    with (
        pytest.raises(BackendError, match=r"backend\.url=\['http://.*'\]: .* refused /health"),
        connected(engine, flat_policy),
    ):
        pass
    engine.answers["/workers"] = 401, ""
    with pytest.raises(BackendError, match=r"refused /workers \(HTTP 401\)"), connected(engine, flat_policy):
        pass


def test_an_engine_that_is_not_there(flat_policy):
    with FakeEngine() as engine:
        url = engine.url
    backend = SGLangBackend(url=url)
    with pytest.raises(BackendError, match="did not answer /workers"):
        backend.start(flat_policy, NoDrafter())


def test_a_router_may_stand_below_a_path(engine, flat_policy):
    client = Client.at(engine.url + "/router/")
    assert client.path == "/router"
    engine.answers |= {"/router/health": (200, "fine"), "/router/x": (200, {"a": 1}), "/router/y": (200, "Words.\n")}
    assert client.is_ready()
    assert client.post("/x", {}) == {"a": 1}
    assert client.get("/health") == "fine"
    assert client.post("/y", {}) == "Words."
    assert client.get_if_known("/z") is None
    with pytest.raises(BackendError, match=r"refused /z \(HTTP 404\): Not Found"):
        client.post("/z", {})


@pytest.mark.parametrize("url", ["http://[::1]:30000", "https://host:443/router", "http://host:80"])
def test_an_address_is_told_as_it_is_written(url):
    assert Client.at(url).url == url
    assert Client.at(url).another().url == url


def test_an_engine_that_is_starting_is_not_ready(engine):
    engine.answers["/health"] = 503, ""
    assert not Client.at(engine.url).is_ready()
    engine.vanish()
    assert not Client.at(engine.url).is_ready()


def test_after_one_refusal_the_engine_goes_on(engine, flat_policy):
    requests = make_requests(2)
    with connected(engine, flat_policy) as backend:
        engine.answers["/generate"] = 400, FAILED
        backend.submit(requests[:1])
        with pytest.raises(BackendError):
            backend.collect()
        del engine.answers["/generate"]
        backend.submit(requests)
        assert len(all_of(backend, 2)) == 2
