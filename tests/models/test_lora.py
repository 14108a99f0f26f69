"""Adapters: nothing but they are trained, the model below is the reference, and what leaves is a plain model."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext

import numpy as np
import peft
import pytest
import torch
from lightning import Trainer
from transformers import AutoModelForCausalLM

from rhymerl import PromptDataModule, Reward, RhymeModule, RolloutSettings
from rhymerl.algos import GRPO, PPO
from rhymerl.drafters import NoDrafter
from rhymerl.errors import ConfigError
from rhymerl.models.critic import CriticSettings
from rhymerl.models.exported import restore
from rhymerl.models.logprobs import token_batch, token_logprobs
from rhymerl.models.lora import LoRA, check_adapters, is_adapted, with_adapters, without_adapters
from rhymerl.models.policy import PolicySource, frozen
from rhymerl.tasks import RunningSum
from rhymerl.testing import RandomTreeDrafter, make_requests, tiny_policy
from rhymerl.training.settings import UpdateSettings
from rhymerl.training.updater import Updater
from tests.engine.test_lossless import answers
from tests.models.hybrid import HYBRIDS, hybrid_model
from tests.models.small import small_model
from tests.models.windowed import windowed_model
from tests.training.updates import scored

QUIET = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "limit_val_batches": 0,
}
TOKENS = torch.arange(12)[None] % 7 + 2


def adapted(dtype: str = "float64", seed: int = 1, **settings):
    """A tiny policy with adapters, as they are after some training."""
    policy = tiny_policy(dtype=dtype)
    LoRA(4, **settings).put_on(policy.model, seed=seed)
    change(policy.model)
    return policy


@torch.no_grad()
def change(model):
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.normal_(std=0.2, generator=torch.Generator().manual_seed(len(name)))


@torch.no_grad()
def logits(model):
    return model.eval()(TOKENS).logits


def trained(model):
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


def test_new_adapters_change_nothing_and_are_all_that_is_trained():
    policy = tiny_policy()
    before = logits(policy.model)
    LoRA(4).put_on(policy.model, seed=0)
    assert torch.equal(logits(policy.model), before)
    assert all("lora_" in name for name in trained(policy.model))
    layers = {name.split(".lora_")[0].rpartition(".")[2] for name in trained(policy.model)}
    assert layers == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert not is_adapted(tiny_policy().model)


def test_the_same_seed_makes_the_same_adapters():
    state = torch.random.get_rng_state()
    one, same, other = (adapted(seed=seed).model.state_dict() for seed in (1, 1, 2))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert any(not torch.equal(one[name], other[name]) for name in one)


def test_without_its_adapters_the_model_is_what_it_was():
    policy = adapted()
    plain = logits(tiny_policy().model)
    assert not torch.allclose(logits(policy.model), plain, atol=1e-3)
    names = trained(policy.model)
    with without_adapters(policy.model):
        assert torch.equal(logits(policy.model), plain)
    assert not torch.allclose(logits(policy.model), plain, atol=1e-3)
    assert trained(policy.model) == names


def test_what_stays_is_the_model_below_only_while_adapters_do_nothing():
    fresh = tiny_policy()
    LoRA(4).put_on(fresh.model, seed=0)
    assert frozen(fresh.model) is fresh.model
    for policy in (adapted(), tiny_policy()):
        stays = frozen(policy.model)
        assert stays is not policy.model
        assert not trained(stays)
        torch.testing.assert_close(logits(stays), logits(policy.model), atol=0, rtol=0)


def test_named_weights_are_those_of_a_plain_model_that_computes_the_same():
    policy = adapted()
    plain = tiny_policy()
    names = [name for name, _ in plain.model.named_parameters()]
    weights = dict(policy.named_weights())
    assert list(weights) == names
    plain.model.load_state_dict(weights, strict=False)
    torch.testing.assert_close(logits(plain.model), logits(policy.model), atol=1e-12, rtol=0)
    assert all(not weight.requires_grad for name, weight in weights.items() if "proj" in name)


def test_of_a_model_without_adapters_they_are_its_parameters_themselves():
    model = tiny_policy().model
    own = dict(model.named_parameters())
    assert all(tensor is own[name] for name, tensor in with_adapters(model, model.named_parameters()))


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_saved_and_restored_it_is_a_plain_model(dtype, tmp_path):
    policy = adapted(dtype)
    policy.save(tmp_path / "saved")
    state = {name: tensor.clone() for name, tensor in policy.model.state_dict().items()}
    restore(policy.files(), state, tmp_path / "restored", read=lambda names: {name: state[name] for name in names})
    tolerance = 1e-12 if dtype == "float64" else 0.2
    for folder in ("saved", "restored"):
        assert not (tmp_path / folder / "adapter_config.json").exists()
        found = AutoModelForCausalLM.from_pretrained(tmp_path / folder, dtype=policy.model.dtype)
        assert not is_adapted(found)
        torch.testing.assert_close(logits(found), logits(policy.model), atol=tolerance, rtol=0)
    saved, restored = ((tmp_path / folder / "model.safetensors").read_bytes() for folder in ("saved", "restored"))
    assert saved == restored


def test_what_a_checkpoint_says_of_adapters_is_the_same_every_time():
    one, same = (json.dumps(adapted().files(), sort_keys=True) for _ in range(2))
    assert one == same


def test_layers_are_named_in_an_order_that_every_process_has():
    model = hybrid_model("bamba")
    LoRA(2, targets=["in_proj", "q_proj"]).put_on(model, seed=0)
    config = model.peft_config["default"]
    assert config.target_modules == ["in_proj", "q_proj"]
    assert config.exclude_modules == ["model.layers.0.mamba.out_proj", "model.layers.2.mamba.out_proj"]


def test_adapters_of_a_bfloat16_model_are_in_float32():
    policy = adapted("bfloat16")
    dtypes = {name: parameter.dtype for name, parameter in policy.model.named_parameters()}
    assert {dtypes[name] for name in trained(policy.model)} == {torch.float32}
    assert {dtype for name, dtype in dtypes.items() if "lora_" not in name} == {torch.bfloat16}
    assert logits(policy.model).isfinite().all()


def test_a_critic_of_its_own_has_adapters_too():
    policy = adapted()
    critic = CriticSettings().build(policy, seed=0)
    of_head = {"head.weight", "head.bias"}
    assert of_head <= set(trained(critic))
    of_body = set(trained(critic)) - of_head
    assert of_body
    assert all("lora_" in name for name in of_body)


def test_a_divergence_is_from_the_model_without_adapters():
    policy, samples = tiny_policy(), scored(6)
    model = policy.model
    LoRA(4).put_on(model, seed=1)
    reference = frozen(model)
    change(model)
    found = []

    class Looking(GRPO):
        def prepare(self, batch):
            found.append(batch)
            return super().prepare(batch)

    settings = UpdateSettings(learning_rate=1e-2)
    optimizer = settings.optimizer(list(model.parameters()))
    updater = Updater(
        model,
        Looking(kl_coef=0.1),
        settings,
        temperature=1.0,
        seed=0,
        backward=torch.Tensor.backward,
        autocast=nullcontext,
        reference=reference,
    )
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    updater.run(samples, 0, optimizer=optimizer, schedule=settings.schedule(optimizer, 1))
    expected = token_logprobs(tiny_policy().model, token_batch(samples, "cpu"), temperature=1.0)
    torch.testing.assert_close(found[0].reference_logprobs, expected, atol=1e-12, rtol=0)
    moved = [name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])]
    assert set(moved) == set(trained(model))


@pytest.mark.parametrize("drafter", [NoDrafter, RandomTreeDrafter])
def test_the_engine_draws_from_the_adapted_policy(drafter):
    policy = adapted()
    done = list(answers(policy, make_requests(6, group_size=2), drafter=drafter()).values())
    plain = tiny_policy()
    plain.model.load_state_dict(dict(policy.named_weights()), strict=False)
    expected = answers(plain, make_requests(6, group_size=2))
    for completion in done:
        assert completion.token_ids.tolist() == expected[completion.request.id].token_ids.tolist()
        np.testing.assert_allclose(completion.logprobs, expected[completion.request.id].logprobs, atol=1e-7)


def test_from_a_source(tmp_path):
    tiny_policy(dtype="float32").save(tmp_path)
    policy = PolicySource(str(tmp_path), adapter=LoRA(2, targets=["q_proj", "v_proj"])).load()
    layers = {name.split(".lora_")[0].rpartition(".")[2] for name in trained(policy.model)}
    assert layers == {"q_proj", "v_proj"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank": 0}, "rank=0: expected at least 1"),
        ({"alpha": 0.0}, "alpha=0.0: expected more than 0, and finite"),
        ({"dropout": 1.0}, "dropout=1.0: expected at least 0 and less than 1"),
    ],
)
def test_arguments_out_of_range(settings, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        LoRA(**settings)


@pytest.mark.parametrize("targets", [None, ["c_attn"]])
def test_a_model_without_linear_layers(targets):
    """Those of GPT-2 are transposed convolutions."""
    with pytest.raises(ConfigError, match=r"adapter: GPT2LMHeadModel has no linear layers of its own; expected null"):
        LoRA(targets=targets).put_on(small_model("gpt2"), seed=0)


def test_targets_that_the_model_lacks():
    message = r"adapter.targets=\['q_proj', 'query'\]: .* no linear layer 'query' of its own; expected some of .*q_proj"
    with pytest.raises(ConfigError, match=message):
        LoRA(targets=["q_proj", "query"]).put_on(tiny_policy().model, seed=0)


def test_a_head_that_is_the_embedding_too_is_no_target():
    with pytest.raises(ConfigError, match="no linear layer 'lm_head' of its own"):
        LoRA(targets=["lm_head"]).put_on(tiny_policy(tied=True).model, seed=0)
    policy = tiny_policy()
    LoRA(2, targets=["lm_head"]).put_on(policy.model, seed=0)
    assert {name.split(".lora_")[0] for name in trained(policy.model)} == {"lm_head"}


def test_adapters_stay_in_float32_under_bf16_true():
    module = RhymeModule(
        adapted("bfloat16"),
        rollout=RolloutSettings(group_size=2, max_tokens=4),
        rewards=Reward(len_of, where="main"),
    )
    data = PromptDataModule(task=RunningSum(difficulty=2, train_size=2, validation_size=1), prompts_per_step=1)
    trainer = Trainer(precision="bf16-true", max_steps=1, accelerator="cpu", **QUIET)
    trainer.fit(module, data)
    model = module.policy.model
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    assert {p.dtype for p in model.parameters() if not p.requires_grad} == {torch.bfloat16}
    moments = [state["exp_avg"].dtype for state in trainer.optimizers[0].state.values()]
    assert set(moments) == {torch.float32}


@pytest.mark.parametrize("algo", [GRPO, PPO])
def test_a_cast_of_the_module_changes_no_bit_of_its_adapters(algo):
    module = RhymeModule(adapted("bfloat16"), algo(), rewards=Reward(len_of, where="main"))
    before = {name: p.clone() for name, p in module.named_parameters() if "lora_" in name}
    assert any(name.startswith("critic.") for name in before) == (algo is PPO)
    module.to(torch.bfloat16)
    after = dict(module.named_parameters())
    assert all(torch.equal(after[name], value) for name, value in before.items())
    module.double()
    assert {after[name].dtype for name in before} == {torch.float64}


def test_experts_are_no_layers():
    init = {"model_type": "qwen3_moe", "hidden_size": 16, "moe_intermediate_size": 8, "intermediate_size": 16}
    sizes = {
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "num_experts": 4,
    }
    source = PolicySource(init={**init, **sizes, "num_experts_per_tok": 2}, dtype="float32")
    plain, policy = source.load(), source.load()
    LoRA(2).put_on(policy.model, seed=0)
    change(policy.model)
    weights = dict(policy.named_weights())
    assert list(weights) == [name for name, _ in plain.model.named_parameters()]
    plain.model.load_state_dict(weights, strict=False)
    torch.testing.assert_close(logits(plain.model), logits(policy.model), atol=1e-5, rtol=0)


OF_FAMILIES = ["deepseek_v3", "qwen2_moe", "falcon_h1", "bamba", "qwen3_5_text", "phimoe", "llama4_text"]


@pytest.mark.parametrize("family", OF_FAMILIES)
def test_all_layers_of_a_family_are_adapted_but_those_that_are_more(family):
    """Fused kernels read the output layers of Mamba mixers, and these routers choose the experts themselves."""
    model = hybrid_model(family) if family in HYBRIDS else windowed_model(family)
    layers = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    before = logits(model)
    LoRA(2).put_on(model, seed=0)
    check_adapters(model)
    assert model.config.model_type == family
    torch.testing.assert_close(logits(model), before, atol=0, rtol=0)
    adapted = {name for name, module in model.named_modules() if isinstance(module, peft.tuners.lora.Linear)}
    more = {name for name in layers if name.endswith(("mamba.out_proj", ".router"))}
    assert adapted == layers - more - {"lm_head"}
    assert bool(more) == (family in ("falcon_h1", "bamba", "phimoe", "llama4_text"))


def test_the_output_layer_of_a_mamba_mixer_is_no_target():
    """A fused kernel reads its weight, so that its adapter would be sampled with and not trained."""
    with pytest.raises(
        ConfigError, match=r"adapter.targets=\['out_proj'\]: FalconH1ForCausalLM has no linear layer 'out_proj'"
    ):
        LoRA(2, targets=["out_proj"]).put_on(hybrid_model("falcon_h1"), seed=0)


def test_a_router_that_chooses_is_no_target():
    with pytest.raises(ConfigError, match=r"Llama4ForCausalLM has no linear layer 'router' of its own"):
        LoRA(2, targets=["router"]).put_on(windowed_model("llama4_text"), seed=0)


def test_adapters_of_another_kind_are_refused():
    for settings, name in (({}, "mine"), ({"use_dora": True}, "default")):
        policy = tiny_policy()
        config = peft.LoraConfig(target_modules=["q_proj"], **settings)
        peft.inject_adapter_in_model(config, policy.model, adapter_name=name)
        with pytest.raises(ValueError, match="^model: it has adapters that are not rhymerl's own"):
            RhymeModule(policy, rewards=Reward(len_of, where="main"))


def len_of(completion: str) -> float:
    return float(len(completion))


def test_without_peft_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigError, match=r"adapter needs peft: pip install 'rhymerl\[lora\]'"):
        LoRA().put_on(tiny_policy().model, seed=0)
