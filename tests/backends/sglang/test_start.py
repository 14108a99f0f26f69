"""The backend with a server of its own, from its start to its end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time

import pytest
import torch

from rhymerl.backends.sglang.backend import SGLangBackend
from rhymerl.backends.sglang.own import check_layers
from rhymerl.backends.sglang.plugin.names import VARIABLE
from rhymerl.backends.sglang.settings import require_sglang
from rhymerl.drafters import Drafter, HistoryTreeDrafter, NoDrafter, RunAheadDrafter
from rhymerl.drafts import Draft
from rhymerl.errors import BackendError, ConfigError
from rhymerl.history import HistoryStore
from rhymerl.testing import make_requests, tiny_policy
from tests.backends.sglang.test_server import ENVIRONMENT, PATH, gone
from tests.backends.sglang.test_session import all_of, assert_whole, synced


@pytest.fixture
def installed(monkeypatch):
    """Pretend that SGLang is installed."""
    monkeypatch.syspath_prepend(str(PATH))
    monkeypatch.setattr("rhymerl.backends.remote.in_flight._HEALTH_S", 0.5)
    monkeypatch.setattr("rhymerl.backends.remote.in_flight._ABORT_S", 0.2)
    monkeypatch.setattr("rhymerl.backends.remote.process._GRACE_S", 0.5)


@contextlib.contextmanager
def started(policy, drafter=None, *, environment=None, **settings):
    with SGLangBackend(max_running=2, environment={**ENVIRONMENT, **(environment or {})}, **settings) as backend:
        backend.start(policy, drafter or HistoryTreeDrafter())
        synced(backend, policy, 0)
        yield backend


def process_of(backend):
    return backend.server.server._process.pid


def test_an_engine_is_told_how_long_sequences_will_be(installed, flat_policy):
    """Buffers grow with that: 131 072 tokens (Qwen2.5) take gigabytes. A stage with longer ones gets another engine."""
    with started(flat_policy, nodes=3) as backend:
        first = process_of(backend)
        assert "--context-length 320 " in backend.server.server.log.read_text()
        backend.check(100)
        backend.start(flat_policy, backend.drafter)
        assert process_of(backend) == first
    backend = SGLangBackend(max_running=2, environment=ENVIRONMENT)
    backend.check(100)
    with backend:
        backend.start(flat_policy, drafter := HistoryTreeDrafter())
        first = process_of(backend)
        assert "--context-length 164 " in backend.server.server.log.read_text()
        backend.check(120)
        backend.start(flat_policy, drafter)
        assert process_of(backend) != first
        assert "--context-length 184 " in backend.server.server.log.read_text()


def test_weights_cannot_go_through_nccl_to_an_engine_on_the_same_gpu(installed, flat_policy, monkeypatch):
    monkeypatch.setattr(type(flat_policy.model), "device", torch.device("cuda"))
    with pytest.raises(ConfigError, match=r"backend\.weights=distributed: .* expected tensor, disk or auto"):
        SGLangBackend(weights="distributed").start(flat_policy, HistoryTreeDrafter())


class Reward(Drafter):
    """Learns from samples."""

    def propose(self, request, context, budget):
        return Draft(token_ids=[], parents=[])

    def learn(self, samples):
        pass


def test_from_its_start_to_its_end(installed, flat_policy):
    requests = make_requests(10)
    with started(flat_policy, nodes=3, arguments={"chunked_prefill_size": 64}) as backend:
        backend.submit(requests)
        assert_whole(all_of(backend, 10), requests)
        metrics = backend.metrics()
        assert {"rollout/passes", "spec/bad_drafts"} == {name for name, value in metrics.items() if type(value) is int}
        assert "spec/draft_hit_rate" in metrics
        leader, folder = process_of(backend), backend.own_folder
        log = backend.server.server.log.read_text()
        settings = json.loads((folder / "engine.json").read_text())
    for words in (
        "--speculative-algorithm RHYMERL --speculative-num-draft-tokens 4",
        "--max-running-requests 2 --tp-size 1 --context-length 320 --skip-tokenizer-init",
        "--dtype float32",
        "--device cpu",
        "--chunked-prefill-size 64",
    ):
        assert words in log
    assert settings["drafter"]["_target_"].endswith("HistoryTreeDrafter")
    assert settings["folder"] == str(folder)
    assert gone(leader)
    assert not folder.exists()
    assert VARIABLE not in os.environ


def test_news_are_written_for_drafters_that_want_them(installed, flat_policy):
    history = HistoryStore()
    with started(flat_policy) as backend:
        backend.follow(history)
        backend.learn([])
        backend.follow(history)
        assert sorted(each.name for each in (backend.own_folder / "feed").iterdir()) == [
            "000000001.feed",
            "000000002.feed",
        ]
        assert backend.in_flight.feed == 2
    for drafter, feed in ((Reward(), 1), (RunAheadDrafter(Reward()), 1), (RunAheadDrafter(HistoryTreeDrafter()), 0)):
        with started(flat_policy, drafter) as backend:
            backend.learn([])
            assert backend.in_flight.feed == feed


@pytest.mark.parametrize("what", ["collect", "withdraw", "sync"])
def test_a_killed_engine_is_one_clear_error(installed, flat_policy, what):
    with started(flat_policy, environment={"FAKE_TOKEN_S": "0.1"}, silence_timeout_s=1e5) as backend:
        backend.submit(make_requests(10))
        act = {
            "collect": backend.collect,
            "withdraw": backend.withdraw,
            "sync": lambda: synced(backend, flat_policy, 1),
        }
        if what == "collect":  # while it waits
            threading.Timer(0.3, os.kill, (process_of(backend), signal.SIGKILL)).start()
        else:
            os.kill(process_of(backend), signal.SIGKILL)
        with pytest.raises(
            BackendError, match=r"(?s)has died \(killed by SIGKILL\); the end of its log.*plugins loaded"
        ):
            act[what]()


def test_a_killed_engine_is_started_again_when_that_is_asked_for(installed, flat_policy):
    requests = make_requests(12)
    with started(flat_policy, environment={"FAKE_TOKEN_S": "0.01"}, restarts=1) as backend:
        backend.follow(HistoryStore())
        backend.submit(requests)
        done = {each.request.id: each for each in backend.collect()}
        first = process_of(backend)
        os.kill(first, signal.SIGKILL)
        done |= all_of(backend, len(requests) - len(done))
        assert_whole(done, requests)
        assert process_of(backend) != first
        assert backend.version == backend.in_flight.policy_version == 0
        assert backend.in_flight.feed == 1, "the new engine's drafter knows no history"
        os.kill(process_of(backend), signal.SIGKILL)
        backend.submit([make_requests(1, seed=5)[0]])
        with pytest.raises(BackendError, match="has died"):
            backend.collect()


def test_an_engine_that_refuses_while_it_dies_has_a_successor(installed, flat_policy, tmp_path):
    """Its last words are not taken for its answer."""
    requests = make_requests(4)
    environment = {"FAKE_FAULT": "refuses and dies", "FAKE_ONCE": str(tmp_path / "happened")}
    with started(flat_policy, environment=environment, restarts=1) as backend:
        first = process_of(backend)
        backend.submit(requests)
        assert_whole(all_of(backend, 4), requests)
        assert process_of(backend) != first


@pytest.mark.parametrize("what", ["sync", pytest.param("rest", marks=pytest.mark.slow)])
def test_an_engine_that_hangs_between_steps_has_a_successor(installed, flat_policy, what):
    with started(flat_policy, restarts=1, silence_timeout_s=1, release_memory=True) as backend:
        os.kill(process_of(backend), signal.SIGSTOP)
        if what == "rest":
            backend.sleep()
        synced(backend, flat_policy, 1)
        requests = make_requests(4)
        backend.submit(requests)
        assert_whole(all_of(backend, 4), requests)


@pytest.mark.parametrize("restarts", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_an_engine_that_hangs_gives_nothing_back(installed, flat_policy, restarts):
    requests = make_requests(4)
    with started(flat_policy, environment={"FAKE_TOKEN_S": "0.02"}, restarts=restarts, silence_timeout_s=1) as backend:
        backend.submit(requests)
        time.sleep(0.2)
        os.kill(process_of(backend), signal.SIGSTOP)
        if not restarts:
            with pytest.raises(BackendError, match=r"(?s)has not given requests back for so long; the end of its log"):
                backend.withdraw()
            return
        back = backend.withdraw()
        backend.submit([each.resume() for each in back if each.finish_reason == "withdrawn"])
        done = {each.request.id: each for each in back if each.finish_reason != "withdrawn"}
        assert_whole(done | all_of(backend, 4 - len(done)), requests)


@pytest.mark.parametrize("what", ["sync", *(pytest.param(what, marks=pytest.mark.slow) for what in ("some", "rest"))])
def test_an_engine_that_dies_unseen_has_a_successor_too(installed, flat_policy, what):
    """Found out by what is asked of it next; nothing is lost but what the dead one had sampled."""
    requests = make_requests(12, max_tokens=20, stop_token_ids=())
    with started(
        flat_policy, environment={"FAKE_TOKEN_S": "0.02"}, restarts=1, release_memory=what == "rest"
    ) as backend:
        first = process_of(backend)
        if what != "rest":
            backend.submit(requests)
            time.sleep(0.2)
        os.kill(first, signal.SIGKILL)
        done = {}
        match what:
            case "some":
                names = {each.id for each in requests[:5]}
                back = backend.withdraw(names)
                assert {each.request.id for each in back} == names
                backend.submit([each.resume() for each in back if each.finish_reason == "withdrawn"])
                done = {each.request.id: each for each in back if each.finish_reason != "withdrawn"}
            case "sync":
                synced(backend, flat_policy, 1)
                assert backend.version == backend.in_flight.policy_version == 1
            case "rest":
                backend.sleep()
                assert backend._delivery.is_asleep, "the successor keeps its memory"
                synced(backend, flat_policy, 0)
                backend.submit(requests)
        assert_whole(done | all_of(backend, 12 - len(done)), requests)
        assert process_of(backend) != first
        assert {int(each) for done in done.values() for each in done.output.policy_versions} <= {0}


def test_an_engine_that_hangs_is_found_out(installed, flat_policy):
    """Stopped, it is alive and says nothing."""
    requests = make_requests(4)
    for restarts in (0, 1):
        with started(
            flat_policy, environment={"FAKE_TOKEN_S": "0.02"}, restarts=restarts, silence_timeout_s=1
        ) as backend:
            backend.submit(requests)
            os.kill(process_of(backend), signal.SIGSTOP)
            if restarts:
                assert_whole(all_of(backend, 4), requests)
                continue
            with pytest.raises(
                BackendError,
                match=r"(?s)silence_timeout_s=1: no answer has come .* fails its health check.*end of its log",
            ):
                all_of(backend, 4)


@pytest.mark.parametrize(
    ("fault", "timeout_s", "message"),
    [
        ("dies", 60, r"has died \(exit code 3\)"),
        ("hangs", 1, r"backend\.start_timeout_s=1: the SGLang engine did not get ready"),
        ("no plugin", 60, "has not loaded rhymerl's plugin"),
        (
            "other version",
            60,
            r"lacks what rhymerl's drafters need \(sglang\.srt\.speculative\.ngram_worker\.NgramCorpus, .*drafter=none",
        ),
    ],
)
def test_an_engine_that_cannot_start_leaves_nothing(
    installed, flat_policy, monkeypatch, tmp_path, fault, timeout_s, message
):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    backend = SGLangBackend(environment={**ENVIRONMENT, "FAKE_FAULT": fault}, start_timeout_s=timeout_s)
    with pytest.raises(BackendError, match=message):
        backend.start(flat_policy, HistoryTreeDrafter())
    assert list(tmp_path.iterdir()) == []


def test_another_version_answers_without_drafts(installed, flat_policy):
    requests = make_requests(3)
    with started(flat_policy, NoDrafter(), environment={"FAKE_FAULT": "other version"}) as backend:
        backend.submit(requests)
        assert_whole(all_of(backend, 3), requests)


def test_a_drafter_that_cannot_be_built_again_is_refused(installed, flat_policy):
    class Nested(Reward):
        def __init__(self, table) -> None:
            self.table = table

    with pytest.raises(ConfigError, match=r"drafter=Nested: cannot be built again in SGLang's process"):
        SGLangBackend().start(flat_policy, Nested({1: object()}))


def test_without_sglang_it_is_said_how_to_install_it(flat_policy, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'rhymerl\[sglang\]'"):
        SGLangBackend().start(flat_policy, NoDrafter())
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name == "sglang" or None)
    require_sglang(memory_saver=False)
    with pytest.raises(ConfigError, match=r"backend\.release_memory=true: expected torch_memory_saver"):
        require_sglang(memory_saver=True)


def test_recurrent_layers_are_refused_on_a_cpu_and_drafts_with_them_are_told(caplog: pytest.LogCaptureFixture):
    """SGLang 0.5.21 ends with "extra_buffer needs CUDA/MUSA/NPU/ROCm/XPU (FLA)" there."""
    settings = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "layer_types": ["linear_attention"] * 2}
    hybrid = tiny_policy("qwen3_5_text", dtype="float32", **settings)
    with SGLangBackend() as backend, pytest.raises(ConfigError) as error:
        backend.start(hybrid, NoDrafter())
    words = "backend=sglang: qwen3_5_text has layers with a recurrent state, "
    assert str(error.value) == words + "which SGLang does not run on a CPU; expected backend=embedded"
    for model, drafts in ((hybrid.model, False), (tiny_policy().model, True)):
        check_layers(model, on_cpu=False, drafts=drafts)
    assert caplog.messages == []
    check_layers(hybrid.model, on_cpu=False, drafts=True)
    (told,) = caplog.messages
    assert told.startswith(words + "with which drafts in SGLang have not been tested")
