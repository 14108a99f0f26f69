"""The same on a GPU: overlapping passes, CUDA graphs, weights handed over in place. Run by hand on a GPU.

RHYMERL_SGLANG_GPU, a JSON object, adds to the backend's `arguments` and `environment`, for machines that lack some
kernels.
"""

from __future__ import annotations

import json
import os
import time

import pytest
import torch

from rhymerl.backends.sglang.backend import SGLangBackend
from rhymerl.drafters import HistoryTreeDrafter, NoDrafter
from rhymerl.history import HistoryStore
from rhymerl.testing import make_requests, tiny_policy
from tests.sglang.engines import answered, embedded, equal, remember, started

ROUNDED = 0.9  # of the answers are equal at least: passes of other shapes round bfloat16 logits otherwise
pytestmark = [pytest.mark.sglang, pytest.mark.gpu]


@pytest.fixture(scope="module")
def policy():
    policy = tiny_policy(dtype="bfloat16", hidden_size=256, context=512)
    policy.model.to("cuda")
    return policy


def engine(**settings):
    of_machine = json.loads(os.environ.get("RHYMERL_SGLANG_GPU", "{}"))
    arguments = {"mem_fraction_static": 0.3, **of_machine.get("arguments", {})}
    return SGLangBackend(
        **{
            "nodes": 7,
            "max_running": 32,
            "arguments": arguments,
            "environment": of_machine.get("environment", {}),
            **settings,
        }
    )


@pytest.mark.parametrize("weights", ["tensor", "disk"])
def test_tokens_with_and_without_drafts(policy, weights):
    requests = make_requests(60, group_size=8)
    ours, history = embedded(policy, requests), HistoryStore()
    remember(history, ours)
    for drafter in (NoDrafter(), HistoryTreeDrafter()):
        with engine(weights=weights) as backend:
            started(backend, policy, drafter).follow(history)
            begun = time.perf_counter()
            answers = answered(backend, requests)
            print(type(drafter).__name__, equal(answers, ours), time.perf_counter() - begun, backend.metrics())
            assert equal(answers, ours) >= ROUNDED


def test_memory_comes_and_goes(policy):
    pytest.importorskip("torch_memory_saver")
    requests = make_requests(16, group_size=4)
    with engine(release_memory=True) as backend:
        started(backend, policy, HistoryTreeDrafter())
        before = answered(backend, requests)
        backend.sleep()
        free = torch.cuda.mem_get_info()[0]
        backend.sync_weights(policy.model.named_parameters(), 1)
        assert torch.cuda.mem_get_info()[0] < free
        assert equal(answered(backend, requests), before) >= ROUNDED
