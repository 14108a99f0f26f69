"""Models that the update would compute wrongly, or not at all, are refused in one line that says why."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import product

import pytest
import torch
from transformers import PreTrainedModel

from rhymerl.errors import ConfigError
from rhymerl.models.logits import transform_of
from rhymerl.models.proof import prove_update
from rhymerl.testing import tiny_policy
from tests.models.small import small_model
from tests.products import values_first


def with_logits(model: PreTrainedModel, change) -> PreTrainedModel:
    plain = model.forward

    def changed(*args, **kwargs):
        output = plain(*args, **kwargs)
        output.logits = change(output.logits)
        return output

    model.forward = changed
    return model


def test_a_head_that_scales_its_logits_is_refused():
    model = tiny_policy().model
    prove_update(model)
    plain = model.forward

    def scaled(*args, **kwargs):
        output = plain(*args, **kwargs)
        output.logits = output.logits * 0.5
        return output

    model.forward = scaled
    with pytest.raises(ConfigError, match="scaled or soft-capped"):
        prove_update(model)


@pytest.mark.parametrize("scale", [1.0, 0.5], ids=["passes", "is refused"])
def test_each_module_is_in_its_own_mode_after_the_proof(scale):
    model = tiny_policy().model.train()
    model.model.embed_tokens.eval()
    model.model.layers[0].mlp.eval()
    modes = {name: module.training for name, module in model.named_modules()}
    assert set(modes.values()) == {True, False}
    plain = model.forward

    def scaled(*args, **kwargs):
        output = plain(*args, **kwargs)
        output.logits = output.logits * scale
        return output

    model.forward = scaled
    with nullcontext() if scale == 1 else pytest.raises(ConfigError):
        prove_update(model)
    assert {name: module.training for name, module in model.named_modules()} == modes


PLAIN = [
    *product(["qwen2", "qwen3", "llama", "gpt2", "olmo2", "phi3"], [torch.float32, torch.float64, torch.bfloat16]),
    *product(["qwen3_moe"], [torch.float32, torch.bfloat16]),  # torch has no grouped product in float64
]


@pytest.mark.parametrize(("model_type", "dtype"), PLAIN)
def test_models_that_are_plain_pass(model_type, dtype):
    prove_update(small_model(model_type, dtype=dtype))


@pytest.mark.parametrize(
    ("cap", "dtype"), values_first([15.0, 30.0, 100.0], [torch.float32, torch.float64, torch.bfloat16])
)
def test_a_cap_shows_though_the_logits_are_small(cap, dtype):
    model = small_model("qwen2", dtype=dtype)
    prove_update(model)
    with pytest.raises(ConfigError, match="scaled or soft-capped"):
        prove_update(with_logits(model, lambda logits: cap * torch.tanh(logits / cap)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_slight_scale_shows(dtype):
    with pytest.raises(ConfigError, match="scaled or soft-capped"):
        prove_update(with_logits(small_model("qwen2", dtype=dtype), lambda logits: logits / 1.0008))


def test_rounding_is_told_from_structure():
    """A sharp and deep model magnifies what float32 rounds off, and float64 does not."""
    coarse = {torch.float32: 1.002}
    prove_update(with_logits(small_model("qwen2", dtype=torch.float32), lambda each: each * coarse.get(each.dtype, 1)))


TRANSFORMED = [
    ("nanochat", {}),
    ("gemma2", {"query_pre_attn_scalar": 8}),
    ("gemma3_text", {"query_pre_attn_scalar": 8, "final_logit_softcapping": 20.0}),
    ("granite", {"logits_scaling": 1.0008}),
    ("granite", {"logits_scaling": 8.0}),
    ("cohere", {"logit_scale": 0.5}),
    ("cohere2", {"logit_scale": 0.0625}),
    ("hyperclovax", {"logits_scaling": 0.125}),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("model_type", "settings"), TRANSFORMED)
def test_logits_that_are_scaled_or_capped_as_the_config_says_pass(model_type, settings, dtype):
    model = small_model(model_type, dtype=dtype, **settings)
    assert not transform_of(model).is_plain
    prove_update(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("model_type", "settings"), TRANSFORMED)
def test_a_config_that_says_something_else_does_not(model_type, settings, dtype):
    model = small_model(model_type, dtype=dtype, **settings)
    transform = transform_of(model)
    cap = transform.cap if transform.cap is not None else 30.0
    for change in (lambda logits: 1.001 * logits, lambda logits: cap * torch.tanh(logits / cap)):
        with pytest.raises(ConfigError, match="scaled or soft-capped by no setting"):
            prove_update(with_logits(small_model(model_type, dtype=dtype, **settings), change))


@pytest.mark.parametrize(
    ("model_type", "settings", "reason"),
    [
        ("bert-generation", {}, "depend on the tokens that follow.*is_decoder"),
        ("bert", {"is_decoder": True}, "more than its output embeddings"),
        ("electra", {"is_decoder": True}, "cannot run it.*RuntimeError"),
        ("xmod", {"is_decoder": True}, r"cannot run it.*\(ValueError: .*language"),
    ],
)
def test_families_that_it_cannot_train_are_named_with_the_reason(model_type, settings, reason):
    with pytest.raises(ConfigError, match=reason) as error:
        prove_update(small_model(model_type, **settings))
    assert "\n" not in str(error.value)


def test_a_window_of_nothing_that_no_layer_has_is_none():
    model = small_model("qwen2_moe", num_experts=2, num_experts_per_tok=1)
    assert model.config.sliding_window == 0
    prove_update(model)


@pytest.mark.parametrize(
    ("model_type", "settings"),
    [
        ("mistral", {"sliding_window": 0}),
        ("mistral", {"sliding_window": -3}),
        ("llama4_text", {"attention_chunk_size": 0, "num_local_experts": 2, "intermediate_size_mlp": 64}),
    ],
)
def test_a_window_of_nothing_is_refused(model_type, settings):
    (name, value), *_ = settings.items()
    with pytest.raises(
        ConfigError, match=rf"{name}={value} in its config.json; expected at least 1, or null for none$"
    ):
        prove_update(small_model(model_type, **settings))


def test_a_neutral_scale_is_none():
    prove_update(small_model("granite", logits_scaling=1.0))


def test_weights_that_are_not_finite_are_named():
    model = tiny_policy().model
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 4] = float("nan")
    with pytest.raises(ConfigError, match=r"not finite: model.layers.1.mlp.up_proj.weight holds NaN"):
        prove_update(model)
