"""Positions that a long neighbour in the same pass would embed otherwise are refused where they can be reached."""

from __future__ import annotations

import pytest

from rhymerl.backends.embedded import EmbeddedBackend
from rhymerl.drafters import NoDrafter
from rhymerl.errors import ConfigError
from rhymerl.models.critic import Critic, CriticSettings
from rhymerl.models.rope import refuse_changing_rope
from rhymerl.testing import make_requests, tiny_policy

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [6.0] * 4,
    "original_max_position_embeddings": 32,
    "factor": 8.0,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0}
BY_LAYER = {"full_attention": LONGROPE, "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0}}


@pytest.mark.parametrize(("rope", "most"), [(LONGROPE, 32), (DYNAMIC, 256)], ids=["longrope", "dynamic"])
def test_refused_from_the_first_token_on_that_changes_a_pass(rope, most):
    model = tiny_policy("llama", rope_parameters=rope).model
    refuse_changing_rope(model, most)
    with pytest.raises(ConfigError, match=rf"model\.init.*{rope['rope_type']}.*{most + 1} tokens.*at most {most}"):
        refuse_changing_rope(model, most + 1)


def test_layers_with_a_rope_of_their_own_are_looked_at():
    policy = tiny_policy()
    policy.model.config.rope_parameters = BY_LAYER
    refuse_changing_rope(policy.model, 32)
    with pytest.raises(ConfigError, match="longrope"):
        refuse_changing_rope(policy.model, 33)


@pytest.mark.parametrize("rope", ["default", "linear", "yarn", "llama3"])
def test_ropes_that_are_the_same_in_every_pass_are_not(rope):
    more = {"low_freq_factor": 1.0, "high_freq_factor": 4.0} if rope == "llama3" else {}
    parameters = {
        "rope_type": rope,
        "rope_theta": 10_000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        **more,
    }
    refuse_changing_rope(tiny_policy("llama", rope_parameters=parameters).model, 256)


def test_the_engine_refuses_what_the_run_can_reach():
    policy = tiny_policy("llama", rope_parameters=LONGROPE)
    with pytest.raises(ConfigError, match="longrope"):
        EmbeddedBackend().start(policy, NoDrafter())  # the whole context
    backend = EmbeddedBackend()
    backend.check(32)
    with backend:
        backend.start(policy, NoDrafter())
        with pytest.raises(ConfigError, match="at most 32"):
            backend.submit(make_requests(1, prompt_tokens=(8, 8), max_tokens=25))
        backend.submit(make_requests(1, prompt_tokens=(8, 8), max_tokens=24))


def test_a_critic_of_its_own_is_looked_at():
    policy = tiny_policy("llama", rope_parameters=LONGROPE)
    critic: Critic = CriticSettings().build(policy, seed=0)
    critic.check(32)
    with pytest.raises(ConfigError, match="critic.*longrope"):
        critic.check(33)
