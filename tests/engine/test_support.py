"""Models that a token tree would silently break are refused with a reason, requests that cannot fit at once."""

from __future__ import annotations

from contextlib import contextmanager

import numpy as np
import pytest
import torch

from rhymerl.backends.embedded import EmbeddedBackend
from rhymerl.drafters import NoDrafter
from rhymerl.engine import support
from rhymerl.engine.engine import Engine
from rhymerl.engine.support import prove_engine, refuse_unsupported
from rhymerl.errors import ConfigError
from rhymerl.testing import RandomTreeDrafter, make_requests, tiny_policy
from tests.models.small import LATENT, small_model


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
        refuse_unsupported(small_model(model_type, **settings))


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3", "llama"])
def test_supported_models_pass_and_prove_it(model_type):
    policy = tiny_policy(model_type)
    refuse_unsupported(policy.model)
    prove_engine(policy.model)


def test_the_proof_leaves_every_module_in_its_own_mode():
    model = tiny_policy().model.train()
    model.model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    prove_engine(model)
    assert [module.training for module in model.modules()] == modes


def test_the_proof_sees_a_model_that_reads_its_neighbours():
    model = tiny_policy().model
    layer = model.model.layers[0].mlp
    plain = layer.forward
    layer.forward = lambda x: plain(x) + x.mean(dim=1, keepdim=True)  # leaks over the packed sequence
    with pytest.raises(ConfigError, match="differ"):
        prove_engine(model)


@contextmanager
def in_packed_passes(model, change):
    """Let `change` edit the arguments of the model's packed passes, within the context."""

    def edited(module, arguments, settings):
        if "rhymerl_plan" in settings:
            change(settings)
        return arguments, settings

    with model.register_forward_pre_hook(edited, with_kwargs=True):
        yield


def hide_a_token(settings):
    settings["rhymerl_plan"].buckets[0].mask[0, -1, 0] = False


def show_a_token(settings):
    mask = settings["rhymerl_plan"].buckets[0].mask
    mask[0, -1, mask[0, -1].logical_not().nonzero()[0, 0]] = True


def move_a_token(settings):
    settings["position_ids"][0, -1] += 1


DTYPES = ["float64", "float32", "bfloat16"]


@pytest.mark.parametrize("change", [hide_a_token, show_a_token, move_a_token])
@pytest.mark.parametrize("factor", [0.25, 1, 4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_proof_sees_one_wrong_mask_entry_or_position(dtype, factor, change):
    model = tiny_policy(dtype=dtype).model
    with torch.no_grad():
        model.model.norm.weight.mul_(factor)
    prove_engine(model)
    with in_packed_passes(model, change), pytest.raises(ConfigError, match="differ"):
        prove_engine(model)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_float32_does_not_tell_from_rounding_is_computed_in_float64(dtype, monkeypatch):
    """float32 gets a negative tolerance, since some CPUs have no rounding here; float64 gets a usual one."""
    model, asked = tiny_policy(dtype=dtype).model, []
    measure = support._difference

    def strict(model, dtype):
        asked.append(dtype)
        difference, most = measure(model, dtype)
        return difference, -1.0 if dtype == torch.float32 else most / 1000

    monkeypatch.setattr(support, "_difference", strict)
    prove_engine(model)
    assert asked == [torch.float32, torch.float64]
    with in_packed_passes(model, move_a_token), pytest.raises(ConfigError, match="differ"):
        prove_engine(model)


@pytest.mark.parametrize("factor", [1, 4, 64])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rounding_is_no_reason_to_refuse(dtype, factor):
    """However sharp the model has become."""
    policy = tiny_policy(dtype=dtype, hidden_size=128, num_layers=6, vocab_size=2000)
    with torch.no_grad():
        policy.model.model.norm.weight.mul_(factor)
    weights = {name: each.clone() for name, each in policy.model.state_dict().items()}
    prove_engine(policy.model)
    for name, each in policy.model.state_dict().items():
        assert each.dtype == weights[name].dtype
        assert torch.equal(each, weights[name])


@pytest.mark.parametrize(
    ("model_type", "settings", "reason"),
    [
        ("nemotron", {}, "TypeError: .*rhymerl_plan"),
        ("deepseek_v2", LATENT, "ValueError: not enough values to unpack"),
        ("deepseek_v3", LATENT, "ValueError: not enough values to unpack"),
        ("diffllama", {}, "IndexError"),
        ("doge", {}, "RuntimeError"),
        ("jetmoe", {"num_local_experts": 2, "num_experts_per_tok": 1, "kv_channels": 8}, "RuntimeError"),
        ("bert-generation", {}, "log-probs of a packed token tree differ"),
    ],
)
def test_families_that_it_cannot_run_are_named_with_the_reason(model_type, settings, reason):
    model = small_model(model_type, **settings)
    modes = {name: module.training for name, module in model.named_modules()}
    implementation = model.config._attn_implementation
    with pytest.raises(
        ConfigError, match=rf"{type(model).__name__}\): the embedded backend cannot run it.*{reason}"
    ) as error:
        prove_engine(model)
    assert "\n" not in str(error.value)
    assert "(Qwen2, Qwen3, Llama, ...)" in str(error.value)
    assert model.config._attn_implementation == implementation
    assert {name: module.training for name, module in model.named_modules()} == modes


@pytest.mark.parametrize(
    ("settings", "names"), [({"kv_tokens": 30}, "backend.kv_tokens"), ({}, "rollout.max_tokens=300")]
)
def test_a_request_that_can_never_fit_is_refused_and_nothing_is_queued(settings, names):
    engine = Engine(tiny_policy(context=128).model, **settings)
    good, bad = make_requests(1, max_tokens=4), make_requests(1, max_tokens=300)
    with pytest.raises(ConfigError, match=names):
        engine.submit([*good, *bad])
    assert not engine.has_work


WINDOWED = {
    "mistral": {"sliding_window": 64},
    "qwen2": {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1},
    "gemma3_text": {"sliding_window": 64, "query_pre_attn_scalar": 8},
}


@pytest.mark.parametrize(("model_type", "settings"), WINDOWED.items())
def test_a_window_that_nothing_exceeds_hides_nothing(model_type, settings):
    model = small_model(model_type, **settings)
    refuse_unsupported(model, 64)
    prove_engine(model)
    with pytest.raises(ConfigError, match="window of 64 tokens.*65 tokens.*at most 64"):
        refuse_unsupported(model, 65)


@pytest.mark.parametrize(("model_type", "settings"), WINDOWED.items())
def test_within_its_window_the_engine_computes_what_the_model_does(model_type, settings):
    model = small_model(model_type, **settings)
    engine = Engine(model, drafter=RandomTreeDrafter(), max_running=4)
    engine.submit(make_requests(6, prompt_tokens=(20, 24), max_tokens=40, stop_token_ids=()))
    while engine.has_work:
        for completion in engine.run():
            prompt, answer = completion.request.prompt.token_ids, torch.from_numpy(completion.token_ids).long()
            tokens = torch.cat([torch.from_numpy(prompt).long(), answer])[None]
            with torch.no_grad():
                logprobs = model(input_ids=tokens).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
            expected = logprobs.gather(-1, answer[:, None])[:, 0].numpy()
            np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)


def test_a_prompt_with_a_token_beyond_the_embedding_is_refused():
    policy = tiny_policy()
    with EmbeddedBackend() as backend:
        backend.start(policy, NoDrafter())
        with pytest.raises(ConfigError, match=r"token 19, the model's embedding has 19 rows"):
            backend.submit(make_requests(1, vocabulary=20, prompt_tokens=(200, 200)))
        assert backend.progress() == {}
