"""An engine's life: new weights, requests taken back and sent on, its death, its successor."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from rhymerl.drafters import HistoryTreeDrafter, NoDrafter
from rhymerl.errors import BackendError, ConfigError
from rhymerl.history import HistoryStore
from rhymerl.testing import make_requests, tiny_policy
from tests.sglang.engines import answered, embedded, equal, remember, sglang, started

pytestmark = [pytest.mark.sglang, pytest.mark.usefixtures("cpu_engine")]


@pytest.fixture
def policy():
    return tiny_policy(dtype="float32", context=512)


def moved(policy, by=0.02):
    """The policy after something like an update."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.add_(by * parameter.std() * torch.randn_like(parameter))


def greedy(policy, prompt, count):
    """Hugging Face's own answer."""
    tokens = torch.from_numpy(prompt.token_ids).long()[None]
    with torch.no_grad():
        out = policy.model.eval().generate(
            tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=count, do_sample=False, pad_token_id=0
        )
    return out[0, tokens.shape[1] :].tolist()


@pytest.mark.parametrize("weights", ["disk", "tensor", "distributed"])
def test_new_weights_and_an_old_history(policy, weights):
    requests = make_requests(12, group_size=4, seed=2)
    with sglang(weights=weights) as backend:
        started(backend, policy, HistoryTreeDrafter())
        history = HistoryStore()
        remember(history, answered(backend, requests))
        backend.follow(history)
        moved(policy)
        backend.sync_weights(policy.model.named_parameters(), 1)
        backend.metrics()
        answers = answered(backend, requests)
        metrics = backend.metrics()
        assert equal(answers, embedded(policy, requests)) >= 0.95
        assert all((each.output.policy_versions == 1).all() for each in answers.values())
        assert metrics["spec/draft_hit_rate"] > 0.9  # what the drafter knows outlives the flush
        assert metrics["rollout/spec_accept_length"] > 1.5
        asked = make_requests(6, seed=4, temperature=0.0, max_tokens=20, stop_token_ids=())
        for each in answered(backend, asked).values():
            assert each.token_ids.tolist() == greedy(policy, each.request.prompt, 20)


def test_rests_during_updates(policy):
    """A CPU frees no memory by it; all else is as on a GPU."""
    requests = make_requests(8, group_size=4, seed=3)
    with sglang(release_memory=True) as backend:
        started(backend, policy, HistoryTreeDrafter())
        for version in (1, 2):
            backend.sleep()
            with pytest.raises(BackendError, match="sync_weights comes before submit"):
                backend.submit(requests)
            moved(policy)
            backend.sync_weights(policy.model.named_parameters(), version)
            assert equal(answered(backend, requests), embedded(policy, requests)) >= 0.95


def test_taken_back_and_sent_on(policy):
    requests = make_requests(8, group_size=4, seed=3, max_tokens=200, stop_token_ids=())
    whole = embedded(policy, requests)
    with sglang() as backend:
        started(backend, policy, HistoryTreeDrafter())
        backend.submit(requests)
        backend.collect(timeout_s=1.0)
        back = {each.request.id: each for each in backend.withdraw()}
        assert backend.collect(timeout_s=0.5) == []
        partial = [each for each in back.values() if each.finish_reason == "withdrawn"]
        assert any(0 < len(each.token_ids) < 200 for each in partial)
        done = answered(backend, [each.resume() for each in partial])
    done |= {name: each for name, each in back.items() if each.finish_reason != "withdrawn"}
    assert equal({name: done[name] for name in done}, {name: whole[name] for name in done}) >= 0.96
    assert all(np.isfinite(each.logprobs).all() and len(each.logprobs) == 200 for each in done.values())


def test_an_update_while_requests_are_in_flight(policy):
    requests = make_requests(8, group_size=2, seed=3, max_tokens=200, stop_token_ids=())
    with sglang() as backend:
        started(backend, policy, HistoryTreeDrafter())
        backend.submit(requests)
        time.sleep(0.5)
        moved(policy)
        backend.sync_weights(policy.model.named_parameters(), 1)
        done = {}
        while len(done) < len(requests):
            done.update((each.request.id, each) for each in backend.collect())
    versions = [each.output.policy_versions for each in done.values()]
    assert all(len(each) == 200 and (np.diff(each) >= 0).all() for each in versions)
    assert any({0, 1} == set(each.tolist()) for each in versions)


def processes_of(backend):
    """The process group of its engine."""
    group = backend.server.server._process.pid
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.getpgid(int(name)) == group:
                found.append(int(name))
        except ProcessLookupError:
            continue
    return found


def resident_pages(pid):
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1])


def killed_soon(backend):
    """The process that computes is killed half a second from now."""
    scheduler = max(processes_of(backend), key=resident_pages)
    timer = threading.Timer(0.5, os.kill, (scheduler, signal.SIGKILL))
    timer.start()
    return timer


def test_a_dead_engine_is_one_clear_error(policy):
    requests = make_requests(16, group_size=4, max_tokens=400, stop_token_ids=(), prompt_tokens=(4, 8))
    with sglang(silence_timeout_s=1e5) as backend:
        started(backend, policy, HistoryTreeDrafter())
        timer = killed_soon(backend)
        backend.submit(requests)
        with pytest.raises(BackendError, match="the SGLang engine has died") as caught:
            list(iter(backend.collect, None))
        timer.join()
        assert "the end of its log" in str(caught.value)
        group = backend.server.server._process.pid
    with pytest.raises(ProcessLookupError):
        os.killpg(group, 0)


def test_a_dead_engine_has_a_successor_when_asked_for(policy):
    requests = make_requests(8, group_size=4, max_tokens=300, stop_token_ids=(), prompt_tokens=(4, 8))
    with sglang(restarts=1) as backend:
        started(backend, policy, HistoryTreeDrafter())
        timer = killed_soon(backend)
        done = answered(backend, requests)
        timer.join()
        assert backend.server.restarts_left == 0
    assert equal(done, embedded(policy, requests)) >= 0.96


def test_an_engine_that_hangs_has_a_successor_too(policy):
    """Its computing process is stopped: it is alive, and says nothing."""
    requests = make_requests(8, group_size=4, max_tokens=200, stop_token_ids=(), prompt_tokens=(4, 8))
    with sglang(restarts=1, silence_timeout_s=3) as backend:
        started(backend, policy, HistoryTreeDrafter())
        os.kill(max(processes_of(backend), key=resident_pages), signal.SIGSTOP)
        done = answered(backend, requests)
        assert backend.server.restarts_left == 0
    assert equal(done, embedded(policy, requests)) >= 0.96


def test_what_cannot_be_answered_is_refused_here(policy):
    with sglang() as backend:
        started(backend, policy, NoDrafter())
        assert backend.engine.get_if_known("/rhymerl/feed") is None  # the trainer alone writes its feed
        for request, message in (
            (make_requests(1, max_tokens=600)[0], "tokens; at most 512 fit"),
            (make_requests(1, vocabulary=30, seed=2, prompt_tokens=(20, 24))[0], "the prompt holds token"),
        ):
            with pytest.raises(ConfigError, match=message):
                backend.submit([request])
        (whole,) = make_requests(1, max_tokens=488, prompt_tokens=(24, 24), stop_token_ids=())
        assert len(answered(backend, [whole])[whole.id].token_ids) == 488  # fills the context to the last token
