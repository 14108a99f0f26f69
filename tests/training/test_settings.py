"""The settings of the update: schedules by hand, and what is refused or warned of."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from rhymerl.algos import GRPO
from rhymerl.backends.embedded import EmbeddedBackend
from rhymerl.budgets import GoodputBudget
from rhymerl.drafters import HistoryTreeDrafter, NoDrafter
from rhymerl.errors import ConfigError
from rhymerl.models.critic import CriticSettings
from rhymerl.rollout import RolloutSettings
from rhymerl.testing import ScriptedBackend, tiny_policy
from rhymerl.training.checks import check_algorithm, warn_of_parts
from rhymerl.training.settings import UpdateSettings
from rhymerl.training.trainer import follow_trainer
from tests.models.windowed import windowed_model
from tests.training.updates import first_policy


def test_activation_checkpointing_is_refused_for_a_model_that_has_none(monkeypatch):
    model = copy.deepcopy(first_policy().model)
    update = UpdateSettings(activation_checkpointing=True)
    update.check(model, 64)
    monkeypatch.setattr(type(model), "supports_gradient_checkpointing", False)
    with pytest.raises(ConfigError, match="update.activation_checkpointing=true: Qwen2ForCausalLM does not support it"):
        update.check(model, 64)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [1, 1, 1, 1, 1]),
        ({"warmup_steps": 2}, [0.5, 1, 1, 1, 1]),
        ({"lr_schedule": "linear"}, [1, 0.75, 0.5, 0.25, 0]),
        ({"lr_schedule": "linear", "min_lr_ratio": 0.2}, [1, 0.8, 0.6, 0.4, 0.2]),
        ({"lr_schedule": "cosine", "warmup_steps": 2}, [0.5, 1, 1, 0.5, 0]),
    ],
)
def test_schedules_by_hand(settings, expected):
    update = UpdateSettings(learning_rate=2.0, **settings)
    optimizer = update.optimizer([nn.Parameter(torch.zeros(2, 2))])
    schedule = update.schedule(optimizer, 4)
    rates = []
    for _ in range(5):
        rates.append(schedule.get_last_lr()[0] / 2)
        optimizer.step()
        schedule.step()
    assert rates == pytest.approx(expected)


@pytest.mark.parametrize("shared", [False, True])
def test_the_policys_schedule_begins_when_it_begins_to_move(shared):
    """Two rollout steps of a critic's warm-up, of two optimizer steps each; then two of the policy's own."""
    update = UpdateSettings(learning_rate=2.0, lr_schedule="linear", warmup_steps=2, mini_batches=2)
    policy = tiny_policy()
    critic = CriticSettings(shared=shared, learning_rate=0.5, warmup_steps=2).build(policy, seed=0)
    optimizer = update.optimizer(list(policy.model.parameters()), critic=critic)
    schedule = update.schedule(optimizer, 10, critic=critic)
    rates = []
    for _ in range(10):
        rates.append((schedule.get_last_lr()[0] / 2, schedule.get_last_lr()[-1] / 0.5))
        optimizer.step()
        schedule.step()
    of_policy, of_critic = zip(*rates, strict=True)
    assert of_policy == pytest.approx([0.5, 0.5, 0.5, 0.5, 0.5, 1, 1, 0.75, 0.5, 0.25])
    assert of_critic == pytest.approx([0.5, 1, 1, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8])


@pytest.mark.parametrize("jitter", [False, True])
def test_what_follows_chance_is_warned_of(jitter, caplog):
    """Phi-MoE draws its experts in training mode, unless its jitter is 0."""
    first, second = (
        [windowed_model("phimoe", router_jitter_noise=each) for each in (0.0, 0.5)]
        if jitter
        else [first_policy(each).model for each in (0.0, 0.3)]
    )
    UpdateSettings().warn(first)
    assert not [record for record in caplog.records if "micro_batch_tokens" in record.getMessage()]
    UpdateSettings().warn(second)
    assert caplog.records[-1].levelname == "WARNING"
    assert "update.micro_batch_tokens" in caplog.text
    torch.manual_seed(0)
    ids = torch.arange(2, 18)[None]
    for model, is_random in ((first, False), (second, True)):
        one, other = (model.train()(ids).logits for _ in range(2))
        assert torch.equal(one, other) != is_random


@pytest.mark.parametrize(
    ("words", "told"),
    [("group_size=8: odd", "rollout.group_size=8: odd"), ("clip=2: too wide", "algo: clip=2: too wide")],
)
def test_what_an_algorithm_refuses_is_named_by_where_it_stands(words, told):
    class Refusing(GRPO):
        def check(self, *, group_size):
            raise ValueError(words)

    with pytest.raises(ValueError, match=f"^{told}"):
        check_algorithm(Refusing(), rollout=RolloutSettings(), update=UpdateSettings(), backend=EmbeddedBackend())


@pytest.mark.parametrize("settings", [{"epochs": 2}, {"mini_batches": 2}])
def test_a_bound_on_the_divergence_needs_several_updates(settings):
    check_algorithm(GRPO(), rollout=RolloutSettings(), update=UpdateSettings(), backend=EmbeddedBackend())
    check_algorithm(
        GRPO(max_kl=0.1), rollout=RolloutSettings(), update=UpdateSettings(**settings), backend=EmbeddedBackend()
    )
    with pytest.raises(ValueError, match=r"^algo.max_kl=0.1 .*update.epochs=1 and update.mini_batches=1"):
        check_algorithm(GRPO(max_kl=0.1), rollout=RolloutSettings(), update=UpdateSettings(), backend=EmbeddedBackend())


def test_biases_and_norms_do_not_decay():
    model = tiny_policy().model
    optimizer = UpdateSettings(weight_decay=0.1).optimizer(list(model.parameters()))
    for group in optimizer.param_groups:
        assert all((p.ndim > 1) == (group["weight_decay"] > 0) for p in group["params"])
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(list(model.parameters()))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mini_batches": 0}, "^mini_batches=0: expected at least 1"),
        ({"epochs": 0}, "^epochs=0: expected at least 1"),
        ({"learning_rate": -1.0}, "^learning_rate=-1.0"),
        ({"lr_schedule": "cubic"}, "^lr_schedule='cubic': expected constant, linear or cosine"),
    ],
)
def test_bad_settings_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        UpdateSettings(**settings)


def test_parts_that_go_by_the_clock_are_told_under_a_deterministic_trainer(caplog: pytest.LogCaptureFixture) -> None:
    policy, parts = (
        tiny_policy(),
        {"drafter": HistoryTreeDrafter(deterministic=False), "budget": GoodputBudget(deterministic=True)},
    )
    warn_of_parts(policy, RolloutSettings(), EmbeddedBackend(), **parts)
    assert caplog.messages == []
    torch.use_deterministic_algorithms(True)
    try:
        warn_of_parts(policy, RolloutSettings(), EmbeddedBackend(), **parts)
    finally:
        torch.use_deterministic_algorithms(False)
    (words,) = caplog.messages
    assert words.startswith(
        "Trainer(deterministic=True), and drafter=HistoryTreeDrafter(deterministic=False) goes by the clock"
    )


def test_parts_that_were_not_told_follow_the_trainer(caplog: pytest.LogCaptureFixture) -> None:
    left, told = [HistoryTreeDrafter(), GoodputBudget()], [GoodputBudget(deterministic=False), NoDrafter()]
    assert not follow_trainer(*left, *told)
    assert left[1]._cost.learns, "it follows the clock until a Trainer says otherwise"
    torch.use_deterministic_algorithms(True)
    assert follow_trainer(*left, *told)
    assert [part.deterministic for part in (*left, told[0])] == [True, True, False]
    assert [part._cost.learns for part in (left[1], told[0])] == [False, True]
    parts = {"drafter": HistoryTreeDrafter(), "budget": GoodputBudget()}
    warn_of_parts(tiny_policy(), RolloutSettings(), EmbeddedBackend(), **parts)
    assert caplog.messages == [], "they are going to follow"


def test_a_backend_that_cannot_say_what_truncation_left_is_told_or_refused(caplog: pytest.LogCaptureFixture) -> None:
    scripted, cut = ScriptedBackend(lambda request: [0]), {"top_p": 0.8}
    warn_of_parts(tiny_policy(), RolloutSettings(**cut), EmbeddedBackend())
    warn_of_parts(tiny_policy(), RolloutSettings(), scripted)
    warn_of_parts(tiny_policy(), RolloutSettings(**cut, sampling_replay=False), scripted)
    assert caplog.messages == []
    warn_of_parts(tiny_policy(), RolloutSettings(**cut), scripted)
    (words,) = caplog.messages
    assert words.startswith("rollout.sampling_replay=null: ScriptedBackend cannot say what truncation left")
    asked = RolloutSettings(**cut, sampling_replay=True)
    check_algorithm(GRPO(), rollout=asked, update=UpdateSettings(), backend=EmbeddedBackend())
    with pytest.raises(
        ValueError, match=r"^rollout\.sampling_replay=true: ScriptedBackend cannot say what truncation left"
    ):
        check_algorithm(GRPO(), rollout=asked, update=UpdateSettings(), backend=scripted)
