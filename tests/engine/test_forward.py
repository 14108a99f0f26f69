"""The direct forward equals transformers', and is not used once somebody changes the model or hooks into it."""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from rhymerl.engine.engine import Engine
from rhymerl.engine.layer_steps import CompiledSteps, TorchSteps
from rhymerl.engine.layout import PassLayout
from rhymerl.testing import RandomTreeDrafter, make_requests, tiny_policy
from tests.engine.test_lossless import answers, assert_same
from tests.models.small import small_model

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


def model_of(family: str, **settings):
    return tiny_policy(family, **({"sliding_window": None} if family == "mistral" else {}), **settings).model


def passes_of(model, **settings) -> tuple[Engine, list[tuple[torch.Tensor, torch.Tensor]]]:
    """Logits of an engine's passes, directly and by transformers over a second engine that is given the same passes."""
    engine, twin = (Engine(model, drafter=RandomTreeDrafter(), max_running=6, **settings) for _ in range(2))
    pairs = []

    def both(layout: PassLayout, also) -> tuple[torch.Tensor, list[torch.Tensor]]:
        found = engine_logits(layout, also)
        pairs.append((found[0], twin.forward._run(None, twin.kv, layout)[0]))
        return found

    engine_logits, engine.forward.logits = engine.forward.logits, both
    engine.submit(make_requests(9, max_tokens=30))
    while engine.has_work:
        engine.run()
    return engine, pairs


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_in_float64_logits_are_transformers_to_the_bit(family, tied):
    engine, pairs = passes_of(model_of(family, tied=tied, attention_bias=True))
    assert engine.forward.kind is not None
    assert len(pairs) > 10
    assert all(torch.equal(direct, expected) for direct, expected in pairs)


@pytest.mark.parametrize("family", FAMILIES)
def test_compiled_in_float32_they_are_so_but_for_rounding(family):
    engine, pairs = passes_of(model_of(family, dtype="float32"))
    assert engine.forward.kind is CompiledSteps
    for direct, expected in pairs:
        torch.testing.assert_close(direct, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_in_bfloat16_and_under_autocast_they_are_transformers_to_the_bit(family):
    engine, pairs = passes_of(model_of(family, dtype="bfloat16"))
    assert engine.forward.kind is TorchSteps
    assert all(torch.equal(direct, expected.float()) for direct, expected in pairs)
    autocast = {"autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16)}
    engine, pairs = passes_of(model_of(family, dtype="float32"), **autocast)
    assert engine.forward.kind is TorchSteps
    assert all(torch.equal(direct, expected.float()) for direct, expected in pairs)


@pytest.mark.parametrize("family", ["ministral", "cwm", "seed_oss"])
def test_families_whose_layers_are_llamas_go_directly(family):
    windows = (
        {} if family == "seed_oss" else {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
    )
    rope = {"rope_type": "default", "rope_theta": 10_000.0}
    own = {"initializer_range": 0.3, "max_position_embeddings": 256, "rope_parameters": rope, **windows}
    engine, pairs = passes_of(small_model(family, dtype=torch.float64, **own).eval())
    assert engine.forward.kind is not None
    assert all(torch.equal(direct, expected) for direct, expected in pairs)


@pytest.mark.parametrize("rope", [{"rope_type": "linear", "factor": 2.0}, {"rope_type": "yarn", "factor": 2.0}])
def test_rotary_embeddings_are_the_models_own(rope):
    engine, pairs = passes_of(model_of("llama", rope_parameters={"rope_theta": 10_000.0, **rope}))
    assert engine.forward.kind is not None
    assert all(torch.equal(direct, expected) for direct, expected in pairs)


def test_angles_that_depend_on_other_positions_are_left_to_transformers():
    rope = {"rope_theta": 10_000.0, "rope_type": "dynamic", "factor": 2.0}
    assert passes_of(model_of("llama", rope_parameters=rope))[0].forward.kind is None


# -- whoever changes the model or listens to it ----------------------------------------------------------------------


class Doubled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def hook_a_layer(model) -> None:
    model.model.layers[0].mlp.register_forward_hook(lambda module, inputs, output: output + 1.0)


def hook_before_a_layer(model) -> None:
    model.model.layers[1].register_forward_pre_hook(lambda module, inputs: (inputs[0] + 1.0, *inputs[1:]))


def replace_a_projection(model) -> None:
    own = model.model.layers[1].self_attn.v_proj
    model.model.layers[1].self_attn.v_proj = doubled = Doubled(
        own.in_features, own.out_features, dtype=own.weight.dtype
    )
    doubled.load_state_dict(own.state_dict())


def replace_a_method(model) -> None:
    norm = model.model.norm
    plain = norm.forward
    norm.forward = lambda x: 2 * plain(x)


def replace_the_class(model) -> None:
    class Mine(type(model)):
        def forward(self, *args, **kwargs):
            output = super().forward(*args, **kwargs)
            output.logits = output.logits / 2
            return output

    model.__class__ = Mine


CHANGES = [hook_a_layer, hook_before_a_layer, replace_a_projection, replace_a_method, replace_the_class]


@pytest.mark.parametrize("change", CHANGES)
def test_whoever_changes_the_model_between_two_runs_is_heard(change):
    """Answers are those of the changed model alone, from the next `run` on."""
    requests = make_requests(4, max_tokens=12, stop_token_ids=())
    policy, fresh = tiny_policy(), tiny_policy()
    engine = Engine(policy.model)
    engine.submit(requests)
    plain = {each.request.id: each for each in engine.run(max_passes=99)}
    assert engine.forward.kind is not None
    for model in (policy.model, fresh.model):
        change(model)
    engine.new_weights(0)
    engine.submit(requests)
    changed = {each.request.id: each for each in engine.run(max_passes=99)}
    assert engine.forward.kind is None
    assert_same(answers(fresh, requests), changed)
    assert any(changed[name].token_ids.tolist() != plain[name].token_ids.tolist() for name in plain), "nothing changed"


def test_a_hook_for_all_modules_is_heard():
    heard = []
    engine = Engine(tiny_policy().model)
    engine.submit(make_requests(1, max_tokens=3, stop_token_ids=()))
    engine.run(max_passes=1)  # directly, once that is proved to be the same
    with torch.nn.modules.module.register_module_forward_hook(lambda *of: heard.append(type(of[0]).__name__)):
        engine.run(max_passes=1)
    assert "Qwen2MLP" in heard


def test_new_values_and_new_tensors_of_weights_are_seen():
    policy, other = tiny_policy(seed=1), tiny_policy(seed=2)
    engine, requests = Engine(policy.model), make_requests(3, max_tokens=8, stop_token_ids=())
    for replace_tensors in (False, True):
        policy.model.load_state_dict(other.model.state_dict(), assign=replace_tensors)
        engine.new_weights(0)
        engine.submit(requests)
        done = {each.request.id: each for each in engine.run(max_passes=99)}
        assert engine.forward.kind is not None
        assert_same(answers(other, requests), done)
        policy.model.load_state_dict(tiny_policy(seed=1).model.state_dict())


def test_between_two_turns_a_models_parts_are_not_looked_up_again():
    engine = Engine(tiny_policy(dtype="float32").model)
    engine.submit(make_requests(2, max_tokens=12, stop_token_ids=()))
    used = [(engine.run(max_passes=2), engine.forward._direct)[1] for _ in range(2)]
    assert used[0] is not None
    assert used[0] is used[1]
    engine.new_weights(1)
    engine.run(max_passes=2)
    assert engine.forward._direct is not used[0]


def test_within_a_context_that_is_ready_another_prepares_only_what_was_forgotten():
    engine = Engine(tiny_policy(dtype="float32").model.train())
    forward, model = engine.forward, engine.model
    with forward.ready():
        first = forward._direct
        with forward.ready():
            assert forward._direct is first
        assert torch.is_inference_mode_enabled()
        assert not model.training
        forward.forget()
        assert not model.training, "passes may still run"
        with forward.ready():
            assert forward._direct not in (first, None)
    assert model.training
    assert not torch.is_inference_mode_enabled()


def bfloat16():
    return torch.autocast("cpu", torch.bfloat16)


def test_copies_that_autocast_makes_of_weights_follow_new_weights():
    policy, other = tiny_policy(dtype="float32", seed=1), tiny_policy(dtype="float32", seed=2)
    engine = Engine(policy.model, autocast=bfloat16)
    engine.submit(make_requests(3, max_tokens=12, stop_token_ids=()))
    engine.run(max_passes=3)
    policy.model.load_state_dict(other.model.state_dict())
    engine.new_weights(1)
    rest = [replace(each.request, output=each.output) for each in engine.withdraw()]
    engine.submit(rest)
    done = {each.request.id: each for each in engine.run(max_passes=99)}
    fresh = Engine(other.model, autocast=bfloat16)
    fresh.new_weights(1)
    fresh.submit(rest)
    assert_same({each.request.id: each for each in fresh.run(max_passes=99)}, done)


def test_a_model_that_computes_something_else_is_left_to_transformers_and_said_so(monkeypatch, caplog):
    """A new version of a family, say: nobody has hooked into it, and yet its layers do more than we know of."""
    from transformers.models.qwen2 import modeling_qwen2

    plain = modeling_qwen2.Qwen2DecoderLayer.forward
    monkeypatch.setattr(
        modeling_qwen2.Qwen2DecoderLayer, "forward", lambda self, *of, **more: 1.01 * plain(self, *of, **more)
    )
    policy, requests = tiny_policy(), make_requests(3, max_tokens=8, stop_token_ids=())
    engine = Engine(policy.model)
    engine.submit(requests)
    with caplog.at_level(logging.WARNING, "rhymerl"):
        done = {each.request.id: each for each in engine.run(max_passes=99)}
        engine.run()
    assert engine.forward.kind is None
    assert [record.getMessage().split(":")[0] for record in caplog.records] == ["Qwen2ForCausalLM"]
    np.testing.assert_allclose(
        [answers(policy, requests)[name].logprobs for name in done], [each.logprobs for each in done.values()]
    )


def test_the_proof_is_made_once_for_the_same_modules(monkeypatch):
    policy = tiny_policy()
    engine, proofs = Engine(policy.model), []
    monkeypatch.setattr(engine.forward, "_compare", lambda kind: proofs.append(kind) or True)
    for number in range(3):
        engine.submit(make_requests(1, max_tokens=2, seed=number))
        engine.run(max_passes=9)
    assert len(proofs) == 1
    policy.model.model.layers[0].mlp = tiny_policy(seed=3).model.model.layers[0].mlp
    engine.submit(make_requests(1, max_tokens=2))
    engine.run(max_passes=9)
    assert len(proofs) == 2
