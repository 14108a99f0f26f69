"""The engine on a CUDA device: the same sampler, the same tokens, log-probs within rounding."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rhymerl.testing import RandomTreeDrafter, make_requests, tiny_policy
from tests.engine.test_lossless import answers

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


def test_bfloat16_generates():
    policy = tiny_policy(dtype="bfloat16", peaked=1.0)
    policy.model.cuda()
    done = answers(policy, make_requests(4))
    assert all(np.isfinite(completion.logprobs).all() for completion in done.values())
    assert torch.cuda.max_memory_allocated() > 0
