"""A real language model: SGLang's answers are the embedded engine's wherever rounding does not decide."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from rhymerl.config import compose
from rhymerl.drafters import HistoryTreeDrafter
from rhymerl.engine.noise import log_race_times, noise_keys
from rhymerl.errors import ConfigError
from rhymerl.history import HistoryStore
from rhymerl.models.policy import Policy, PolicySource
from rhymerl.types import Completion
from tests.pretrained.questions import requests
from tests.sglang.engines import answered, embedded, largest_difference, remember, sglang, started

pytestmark = [pytest.mark.sglang, pytest.mark.usefixtures("cpu_engine")]

QUESTIONS = (
    "What is the capital of France?",
    "What is 2 + 2?",
    "Name three colours.",
    "Write one sentence about the sea.",
)
ROUNDING = 2e-3  # of a logit, float32


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    try:
        source = PolicySource(compose("smollm2").model.path)
    except ConfigError as missing:  # `make test-sglang` fetches it
        pytest.skip(str(missing))
    folder: Path = tmp_path_factory.mktemp("smollm2")
    source.load().save(folder)
    return PolicySource(str(folder)).load()


def is_a_near_tie(policy: Policy, ours: Completion, theirs: Completion) -> bool:
    """Return whether rounding decided the first differing token, by logit / T plus the request's own noise."""
    length = min(len(ours.token_ids), len(theirs.token_ids))
    at = int(np.flatnonzero(ours.token_ids[:length] != theirs.token_ids[:length])[0])
    request = ours.request
    tokens = np.concatenate([request.prompt.token_ids, ours.token_ids[:at]])
    with torch.no_grad():
        logits = policy.model(torch.from_numpy(tokens).long()[None]).logits[0, -1].double()
    keys = noise_keys(np.array([request.seed], np.uint64), np.array([at], np.int64))
    scores = (
        logits / request.sampling.temperature - log_race_times(torch.from_numpy(keys.astype(np.int64)), len(logits))[0]
    )
    first, second = (float(scores[int(each.token_ids[at])]) for each in (ours, theirs))
    return abs(first - second) < ROUNDING and max(first, second) >= float(scores.max()) - ROUNDING


def test_its_answers_are_the_embedded_engines(policy: Policy) -> None:
    asks = requests(policy, QUESTIONS, samples=3, max_tokens=40, temperature=1.0)
    ours = embedded(policy, asks)
    history = HistoryStore()
    remember(history, ours)
    with sglang() as backend:
        started(backend, policy, HistoryTreeDrafter())
        plain = answered(backend, asks)
        backend.follow(history)
        backend.metrics()
        drafted = answered(backend, asks)
        metrics = backend.metrics()
        greedy = answered(backend, requests(policy, QUESTIONS[:1], samples=1, max_tokens=20, temperature=0.0))
    for theirs in (plain, drafted):
        others = [name for name in ours if not np.array_equal(ours[name].token_ids, theirs[name].token_ids)]
        print(f"{len(ours) - len(others)} of {len(ours)} answers are equal")
        assert len(others) <= len(ours) // 4
        assert all(is_a_near_tie(policy, ours[name], theirs[name]) for name in others)
        assert largest_difference(ours, theirs) < 1e-3
        assert {name: each.finish_reason for name, each in theirs.items() if name not in others} == {
            name: each.finish_reason for name, each in ours.items() if name not in others
        }
    assert metrics["rollout/spec_accept_length"] > 2
    assert any(each.finish_reason == "stop" for each in ours.values())
    assert "Paris" in policy.tokenizer.decode(greedy["0/0"].token_ids)  # by its chat template it was asked a question
    assert greedy["0/0"].finish_reason == "stop"
