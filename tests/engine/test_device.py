"""The engine on a CUDA device: the same sampler, the same tokens, log-probs within rounding."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rhymerl.engine import graphs
from rhymerl.engine.engine import Engine
from rhymerl.testing import RandomTreeDrafter, make_requests, tiny_policy
from tests.engine.test_lossless import answers
from tests.models.windowed import windowed_model

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3", "llama"])
@pytest.mark.parametrize("drafted", [False, True])
def test_float64_tokens_are_those_of_the_cpu(model_type, drafted):
    requests = make_requests(8, group_size=4)
    here = answers(tiny_policy(model_type), requests, max_running=16)
    policy = tiny_policy(model_type)
    policy.model.cuda()
    there = answers(policy, requests, max_running=16, drafter=RandomTreeDrafter() if drafted else None)
    for name, completion in here.items():
        assert there[name].token_ids.tolist() == completion.token_ids.tolist()
        np.testing.assert_allclose(there[name].logprobs, completion.logprobs, atol=1e-6)  # RoPE is float32 on both


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3", "llama"])
@pytest.mark.parametrize("drafted", [False, True])
def test_float32_goes_by_graphs_with_nearly_all_tokens_of_the_cpu(model_type, drafted):
    requests = make_requests(24, group_size=4)
    here = answers(tiny_policy(model_type, dtype="float32"), requests, max_running=16)
    policy = tiny_policy(model_type, dtype="float32")
    policy.model.cuda()
    engine = Engine(policy.model, drafter=RandomTreeDrafter() if drafted else None, max_running=16)
    engine.submit(requests)
    there = {}
    while engine.has_work:
        there |= {each.request.id: each for each in engine.run()}
    assert engine.forward.tile_tokens is not None
    assert len(engine.forward._graphs._graphs) > 1
    same = [name for name in here if there[name].token_ids.tolist() == here[name].token_ids.tolist()]
    assert len(same) >= 0.97 * len(here)
    for name in same:
        np.testing.assert_allclose(there[name].logprobs, here[name].logprobs, atol=1e-4)


@pytest.mark.parametrize(("family", "is_direct"), [("mistral", True), ("gemma2", False), ("gpt_oss", False)])
def test_windows_soft_caps_and_sinks_use_the_kernel(family, is_direct):
    """Families whose layers are not Llama's go through transformers, to the same kernel."""
    model, requests = windowed_model(family, dtype=torch.float32), make_requests(24, group_size=4, vocabulary=16)
    here = answers(SimpleNamespace(model=model), requests, max_running=16)
    engine = Engine(model.cuda(), drafter=RandomTreeDrafter(vocabulary=16), max_running=16)
    engine.submit(requests)
    there = {}
    while engine.has_work:
        there |= {each.request.id: each for each in engine.run()}
    assert engine.forward.tile_tokens is not None
    assert (engine.forward.kind is not None) == is_direct
    same = [name for name in here if there[name].token_ids.tolist() == here[name].token_ids.tolist()]
    assert len(same) >= 0.9 * len(here)


def test_graphs_follow_weights_that_change_in_place():
    policy, requests = tiny_policy(dtype="float32"), make_requests(8, group_size=4)
    policy.model.cuda()
    engine = Engine(policy.model)
    for _ in range(2):
        engine.submit(requests)
        done = {}
        while engine.has_work:
            done |= {each.request.id: each for each in engine.run()}
        fresh = answers(policy, requests)
        assert all(done[name].token_ids.tolist() == fresh[name].token_ids.tolist() for name in fresh)
        with torch.no_grad():
            for parameter in policy.model.parameters():
                parameter.mul_(1.5)
        engine.new_weights(1)


@pytest.mark.parametrize("deterministic", [False, True])
def test_answers_that_grow_need_other_graphs(monkeypatch, deterministic):
    """The buffer is replaced in the middle, and what was captured is of no use any more."""
    monkeypatch.setattr(graphs, "_LEAST_BYTES", 1)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # as Lightning's Trainer sets it
    policy, requests = tiny_policy(dtype="float32"), make_requests(8, group_size=8, max_tokens=200, stop_token_ids=())
    policy.model.cuda()
    torch.use_deterministic_algorithms(deterministic)
    try:
        engine = Engine(policy.model)
        first = engine.forward._graphs._place
        engine.submit(requests)
        while engine.has_work:
            engine.run()
        assert engine.forward.tile_tokens is not None
        assert engine.forward._graphs._place.pool != first.pool
    finally:
        torch.use_deterministic_algorithms(False)


def test_bfloat16_goes_by_graphs():
    policy = tiny_policy(dtype="bfloat16", peaked=1.0)
    policy.model.cuda()
    engine = Engine(policy.model)
    engine.submit(make_requests(4))
    while engine.has_work:
        engine.run()
    assert engine.forward.tile_tokens is not None
    assert engine.forward._graphs._graphs


def test_bfloat16_generates():
    policy = tiny_policy(dtype="bfloat16", peaked=1.0)
    policy.model.cuda()
    done = answers(policy, make_requests(4))
    assert all(np.isfinite(completion.logprobs).all() for completion in done.values())
    assert torch.cuda.max_memory_allocated() > 0
