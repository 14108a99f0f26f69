"""Models that a token tree would silently break are refused with the reason; requests that cannot fit are refused at once."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rhymerl.engine.engine import Engine
from rhymerl.engine.support import prove, refuse_unsupported
from rhymerl.errors import ConfigError
from rhymerl.testing import make_requests, tiny_policy

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 19,
    "pad_token_id": 0,
}


def build(model_type: str, **settings):
    return AutoModelForCausalLM.from_config(
        AutoConfig.for_model(model_type, **{**SMALL, **settings}), dtype=torch.float32
    )


@pytest.mark.parametrize(
    ("model_type", "settings", "reason"),
    [
        ("mistral", {"sliding_window": 16}, "window of 16"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, "sliding_attention"),
        ("gemma2", {}, "sliding_attention|soft-capped"),
        ("gpt_oss", {"num_local_experts": 2, "num_experts_per_tok": 1}, "sliding_attention|sinks"),
        ("qwen3_next", {"num_experts": 2, "num_experts_per_tok": 1, "linear_num_value_heads": 2,
                        "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}, "linear_attention"),
    ],
)  # fmt: skip
def test_refused_with_the_reason(model_type, settings, reason):
    with pytest.raises(ConfigError, match=reason):
        refuse_unsupported(build(model_type, **settings))


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3", "llama"])
def test_supported_models_pass_and_prove_it(model_type):
    policy = tiny_policy(model_type)
    refuse_unsupported(policy.model)
    prove(policy.model)


def test_the_proof_leaves_every_module_in_its_own_mode():
    model = tiny_policy().model.train()
    model.model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    prove(model)
    assert [module.training for module in model.modules()] == modes


def test_the_proof_sees_a_model_that_reads_its_neighbours():
    model = tiny_policy().model
    layer = model.model.layers[0].mlp
    plain = layer.forward
    layer.forward = lambda x: plain(x) + x.mean(dim=1, keepdim=True)  # leaks over the packed sequence
    with pytest.raises(ConfigError, match="differ"):
        prove(model)


@pytest.mark.parametrize(
    ("settings", "names"), [({"kv_tokens": 30}, "backend.kv_tokens"), ({}, "rollout.max_tokens=300")]
)
def test_a_request_that_can_never_fit_is_refused_and_nothing_is_queued(settings, names):
    engine = Engine(tiny_policy(context=128).model, **settings)
    good, bad = make_requests(1, max_tokens=4), make_requests(1, max_tokens=300)
    with pytest.raises(ConfigError, match=names):
        engine.submit([*good, *bad])
    assert not engine.has_work
