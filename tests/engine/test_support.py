"""Models that a token tree would silently break are refused with a reason, requests that cannot fit at once."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

from rhymerl.backends.embedded import EmbeddedBackend
from rhymerl.drafters import NoDrafter
from rhymerl.engine import support
from rhymerl.engine.engine import Engine
from rhymerl.engine.support import prove_engine, refuse_unsupported
from rhymerl.errors import ConfigError
from rhymerl.models.proof import prove_sharing
from rhymerl.testing import make_requests, tiny_policy
from tests.models.hybrid import HYBRIDS, hybrid_model
from tests.models.small import LATENT, small_model
from tests.products import pairs_first, values_first


@pytest.mark.parametrize(
    ("model_type", "settings", "reason"),
    [
        ("deepseek_v32", LATENT, "indexed_attention"),
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
    mask[0, -1, mask[0, -1].logical_not().nonzero()[:1, 0]] = True  # from a prompt's last token none is hidden


def move_a_token(settings):
    settings["position_ids"][0, -1] += 1


DTYPES = ["float64", "float32", "bfloat16"]


@pytest.mark.parametrize(
    ("dtype", "factor", "change"), pairs_first(DTYPES, [0.25, 1, 4], [hide_a_token, show_a_token, move_a_token])
)
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


@pytest.mark.parametrize(("dtype", "factor"), values_first(DTYPES, [1, 4, 64]))
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


LIGHTNING = {"layer_types": ["linear_attention", "full_attention"]}


@pytest.mark.parametrize("family", HYBRIDS)
def test_a_hybrid_of_16_bits_is_proved_although_its_layers_read_the_weights_of_their_convolutions(family):
    model = hybrid_model(family, dtype=torch.bfloat16)
    prove_engine(model)
    assert prove_sharing(model.get_decoder(), 64, model=model) is None
    assert {parameter.dtype for parameter in model.parameters()} <= {torch.bfloat16, torch.float32}


@pytest.mark.parametrize(
    ("model_type", "settings", "reason"),
    [
        ("nemotron", {}, "TypeError: .*rhymerl_plan"),
        ("diffllama", {}, "TypeError: .*in no cache"),
        ("doge", {}, "RuntimeError"),
        ("bert-generation", {}, "log-probs of a packed token tree differ"),
        ("minimax", {**LIGHTNING, "num_local_experts": 2, "num_experts_per_tok": 1}, "MiniMax uses cache of its own"),
        ("jamba", {}, "ValueError"),
        ("mamba", {}, "log-probs of a packed token tree differ"),
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
    assert "(Qwen2, Qwen3, Llama, Gemma, Mistral, ...)" in str(error.value)
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


def test_a_prompt_with_a_token_beyond_the_embedding_is_refused():
    policy = tiny_policy()
    with EmbeddedBackend() as backend:
        backend.start(policy, NoDrafter())
        with pytest.raises(ConfigError, match=r"token 19, the model's embedding has 19 rows"):
            backend.submit(make_requests(1, vocabulary=20, prompt_tokens=(200, 200)))
        assert backend.progress() == {}
