"""The critic: what it reads, where it starts, how it is saved and what it refuses."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

from rhymerl.errors import ConfigError
from rhymerl.models.critic import Critic, CriticSettings
from rhymerl.models.logprobs import hidden_states, policy_output, token_batch
from rhymerl.models.policy import Policy
from rhymerl.models.tokenizers import character_tokenizer
from rhymerl.testing import tiny_policy
from rhymerl.training.settings import UpdateSettings
from tests.models.test_logprobs import make_samples

KINDS = pytest.mark.parametrize("shared", [True, False])


def built(policy: Policy, *, seed: int = 0, **settings: object) -> Critic:
    return CriticSettings(**settings).build(policy, seed=seed)


def values_of(policy: Policy, critic: Critic, count: int = 6) -> torch.Tensor:
    output = policy_output(policy.model, token_batch(make_samples(count), "cpu"), temperature=1.0, critic=critic)
    return output.values


@KINDS
def test_values_stand_in_front_of_each_response_token(shared):
    policy, samples = tiny_policy(), make_samples(6)
    critic = built(policy, shared=shared, head_std=0.5)
    values = values_of(policy, critic)
    assert values.shape == (6, max(map(len, samples)))
    for sample, line in zip(samples, values, strict=True):
        prompt = len(sample.prompt.token_ids)
        whole = torch.tensor([[*sample.prompt.token_ids, *sample.completion.token_ids]])
        hidden = policy.model.get_decoder()(whole).last_hidden_state[0, prompt - 1 : -1]
        expected = hidden @ critic.head.weight + critic.head.bias
        torch.testing.assert_close(line[: len(sample)], expected, atol=1e-12, rtol=0)
        assert not line[len(sample) :].any()


@KINDS
def test_first_values_are_zero_unless_asked_otherwise_and_follow_the_seed(shared):
    policy = tiny_policy()
    assert not values_of(policy, built(policy, shared=shared)).any()
    one, same, other = (values_of(policy, built(policy, shared=shared, head_std=0.1, seed=seed)) for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_a_shared_critic_trains_the_policys_backbone_and_its_own_one_does_not():
    for shared in (True, False):
        policy = tiny_policy()
        critic = built(policy, shared=shared, head_std=0.5)
        values_of(policy, critic).sum().backward()
        assert critic.head.weight.grad.abs().sum() > 0
        reached = policy.model.get_decoder().layers[0].mlp.up_proj.weight.grad is not None
        assert reached == shared
        if not shared:
            assert critic.body.layers[0].mlp.up_proj.weight.grad.abs().sum() > 0


def test_its_own_backbone_is_a_copy_that_moves_alone():
    policy = tiny_policy()
    critic = built(policy, head_std=0.5)
    before = values_of(policy, critic)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.zero_()
    assert torch.equal(values_of(policy, critic), before)


def test_its_own_backbone_may_come_from_a_directory(tmp_path: Path):
    policy, other = tiny_policy(), tiny_policy("llama", hidden_size=16, seed=5)
    other.save(tmp_path)
    critic = built(policy, path=str(tmp_path), head_std=0.5)
    assert critic.body.training
    assert critic.head.weight.shape == (16,)
    assert critic.body.dtype == critic.head.weight.dtype == torch.float64
    batch = token_batch(make_samples(3), "cpu")
    states = hidden_states(critic.body, batch)
    torch.testing.assert_close(states, hidden_states(other.model.get_decoder(), batch))


def test_the_names_of_its_own_backbone_are_those_in_the_model_it_comes_from():
    """OPT's decoder lies deeper than its base model."""
    from transformers import OPTConfig, OPTForCausalLM

    sizes = {"hidden_size": 8, "ffn_dim": 8, "num_attention_heads": 2, "num_hidden_layers": 1, "word_embed_proj_dim": 8}
    nested = Policy(model=OPTForCausalLM(OPTConfig(vocab_size=19, **sizes)), tokenizer=tiny_policy().tokenizer)
    for policy in (nested, tiny_policy()):
        critic = built(policy)
        names = dict(policy.model.named_parameters())
        assert {f"{critic.prefix}{name}" for name, _ in critic.body.named_parameters()} <= names.keys()
    assert built(nested).prefix == "model.decoder."


@KINDS
def test_the_head_is_in_float32_or_better(shared):
    policy = tiny_policy(dtype="bfloat16", peaked=1.0)
    critic = built(policy, shared=shared, head_std=0.5)
    assert critic.head.weight.dtype == torch.float32
    assert critic.to(torch.bfloat16).head.weight.dtype == torch.float32
    assert critic.double().head.weight.dtype == torch.float64
    critic = built(policy, shared=shared, head_std=0.5)
    assert values_of(policy, critic).dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert values_of(policy, critic).dtype == torch.float32


def test_without_the_policy_only_values_have_a_gradient():
    policy = tiny_policy()
    for shared in (True, False):
        critic = built(policy, shared=shared, head_std=0.5)
        batch = token_batch(make_samples(4), "cpu")
        output = policy_output(policy.model, batch, temperature=1.0, critic=critic, trains_policy=False)
        assert not output.logprobs.requires_grad
        output.values.sum().backward()
        assert all(parameter.grad is None for parameter in policy.model.parameters())
        assert all(parameter.grad is not None for name, parameter in critic.named_parameters() if "embed" not in name)


@KINDS
def test_its_parameters_are_groups_of_the_one_optimizer_with_their_own_rate(shared):
    policy = tiny_policy()
    critic = built(policy, shared=shared, learning_rate=0.5)
    update = UpdateSettings(learning_rate=2.0, weight_decay=0.1, warmup_steps=2)
    optimizer = update.optimizer(list(policy.model.parameters()), critic=critic)
    found = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    everything = [*policy.model.parameters(), *critic.parameters()]
    assert len(found) == len(everything)
    assert set(map(id, found)) == set(map(id, everything))
    of_critic = set(map(id, critic.parameters()))
    schedule = update.schedule(optimizer, 10)
    for group in optimizer.param_groups:
        assert {id(parameter) in of_critic for parameter in group["params"]} == {group["initial_lr"] == 0.5}
        assert group["lr"] == group["initial_lr"] / 2
    assert (schedule.get_last_lr()[0], schedule.get_last_lr()[-1]) == (1.0, 0.25)


class Whole(nn.Module):
    def __init__(self, critic: Critic | None) -> None:
        super().__init__()
        self.critic = critic


@KINDS
def test_it_is_saved_and_loaded_exactly(shared):
    policy = tiny_policy()
    saved = Whole(built(policy, shared=shared, head_std=0.5, seed=1))
    fresh = Whole(built(policy, shared=shared, head_std=0.5, seed=2))
    fresh.load_state_dict(copy.deepcopy(saved.state_dict()))
    assert torch.equal(values_of(policy, fresh.critic), values_of(policy, saved.critic))


@pytest.mark.parametrize(
    ("saved", "here", "message"),
    [
        (None, False, "the checkpoint holds no critic"),
        (True, False, "critic.shared=false: the critic in the checkpoint has the policy's; expected true"),
        (False, True, "critic.shared=true: the critic in the checkpoint has a backbone of its own; expected false"),
    ],
)
def test_weights_of_another_kind_are_refused(saved, here, message):
    policy = tiny_policy()
    state = Whole(None if saved is None else built(policy, shared=saved)).state_dict()
    with pytest.raises(ConfigError, match=message):
        Whole(built(policy, shared=here)).load_state_dict(state)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"learning_rate": -1.0}, "^learning_rate=-1.0: expected at least 0"),
        ({"head_std": -0.1}, "^head_std=-0.1: expected at least 0"),
        ({"warmup_steps": -1}, "^warmup_steps=-1: expected at least 0"),
        ({"shared": True, "path": "x"}, "^path='x' with shared=true"),
    ],
)
def test_bad_settings_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        CriticSettings(**settings)


def test_a_path_that_is_no_model_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"^critic.path='.*nowhere': no such directory"):
        built(tiny_policy(), path=str(tmp_path / "nowhere"))


def test_another_tokenizer_is_refused(tmp_path: Path):
    other = tiny_policy("llama")
    Policy(model=other.model, tokenizer=character_tokenizer("abc")).save(tmp_path)
    with pytest.raises(ConfigError, match="its tokens are not the policy's"):
        built(tiny_policy(), path=str(tmp_path))


def test_a_context_that_is_too_short_is_refused(tmp_path: Path):
    tiny_policy(context=32).save(tmp_path)
    critic = built(tiny_policy(), path=str(tmp_path))
    critic.check(32)
    with pytest.raises(ConfigError, match="its context is 32 tokens, a prompt and its answer may have 33"):
        critic.check(33)
