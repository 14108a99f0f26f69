"""PPO as a whole: resumed exactly with its critic, equal on two ranks, exported without it, shown on TensorBoard."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM

from rhymerl.algos import PPO
from rhymerl.config import compose
from rhymerl.models.critic import CriticSettings
from tests.integration import training
from tests.integration.conftest import Run, assert_same, checkpoint
from tests.integration.ranked import run_ranks

KINDS = pytest.mark.parametrize("shared", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["shared", "own"])
EVERYTHING = ["algo.kl_coef=0.05", "algo.kl_target=2.0", "critic.warmup_steps=1", "critic.head_std=0.1"]
METRICS = [
    "critic/vf_loss",
    "critic/vf_clipfrac",
    "critic/vf_explained_var",
    "critic/grad_norm",
    "critic/lr",
    "kl",
    "kl_coef",
    "timing_s/ref",
    "timing_s/values",
    "timing_s/advantage",
]
STEPS = 3


def words_for(settings: list[str], run_dir: Path, *, shared: bool) -> list[str]:
    kind = f"critic.shared={str(shared).lower()}"
    return [*settings, "algo=ppo", *EVERYTHING, kind, "checkpoint.keep=6", f"run_dir={run_dir}"]


@KINDS
def test_a_resumed_run_is_the_whole_one(shared, settings, tmp_path, rhymerl: Run):
    whole, later = tmp_path / "whole", tmp_path / "later"
    done = rhymerl(*words_for(settings, whole, shared=shared))
    assert done.code == 0, done.err
    start = f"ckpt_path={whole / 'checkpoints' / 'step=2.ckpt'}"
    done = rhymerl(*words_for(settings, later, shared=shared), start)
    assert done.code == 0, done.err
    one, two = checkpoint(whole), checkpoint(later)
    assert one["rhymerl"]["num_rollouts"] == two["rhymerl"]["num_rollouts"] == 6
    assert any(name.startswith("critic.body.") for name in one["state_dict"]) == (not shared)
    assert one["rhymerl"]["algo"]["kl_coef"] != 0.05
    for part in ("state_dict", "optimizer_states", "lr_schedulers"):
        assert_same(one[part], two[part], part)
    assert_same(one["rhymerl"]["algo"], two["rhymerl"]["algo"])


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ppo") / "run"


@pytest.fixture
def trained(run_dir: Path, settings: list[str], rhymerl: Run) -> Path:
    """A run with a critic of its own; made once."""
    if not run_dir.exists():
        done = rhymerl(*words_for(settings, run_dir, shared=False))
        assert done.code == 0, done.err
    return run_dir


def test_metrics_on_tensorboard(trained):
    events = EventAccumulator(str(trained / "tensorboard"))
    events.Reload()
    assert set(METRICS) - set(events.Tags()["scalars"]) == set()
    policys, critics = ([event.value for event in events.Scalars(name)] for name in ("learning_rate", "critic/lr"))
    # One schedule, which begins for the policy one step later, when the critic's warm-up is over.
    assert critics[0] == pytest.approx(policys[1] * 1e-5 / 1e-2)
    assert policys[0] < policys[1] < policys[2] > policys[-1]
    # The policy rests in the first step, so it has no gradient there.
    assert len(events.Scalars("grad_norm")) == 5


def test_the_critic_stays_behind_when_the_policy_is_exported(trained, tmp_path, rhymerl: Run):
    assert rhymerl("export", str(trained), str(tmp_path / "out")).code == 0
    policy = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    saved = checkpoint(trained)["state_dict"]
    assert {f"model.{name}" for name in policy} == {name for name in saved if not name.startswith("critic.")}
    assert all(torch.equal(weight, saved[f"model.{name}"]) for name, weight in policy.items())


def test_the_policy_is_evaluated_without_its_critic(trained, settings, rhymerl: Run):
    results = []
    start = f"ckpt_path={trained / 'checkpoints' / 'last.ckpt'}"
    for algo in ("ppo", "grpo"):
        done = rhymerl("evaluate", *settings[1:], f"algo={algo}", start, "--json")
        assert done.code == 0, done.err
        results.append(json.loads(done.out))
    assert results[0] == results[1]


def test_another_kind_of_critic_is_refused_before_anything_is_computed(trained, settings, tmp_path, rhymerl: Run):
    start = f"ckpt_path={trained / 'checkpoints' / 'last.ckpt'}"
    for words, named in (
        (words_for(settings, tmp_path / "run", shared=True), "critic."),
        ([*settings, f"run_dir={tmp_path / 'run'}"], "critic."),
    ):
        done = rhymerl(*words, start)
        assert done.code == 2
        assert named in done.err
        assert not (tmp_path / "run" / "checkpoints").exists()


def train(devices: int) -> dict[str, dict[str, torch.Tensor]]:
    """Weights by the kind of critic."""
    run = training.Run(num_steps=STEPS, prompts_per_step=3, stop_token_ids=(3, 5), devices=devices)
    return {
        kind: run.train(
            algo=PPO(kl_coef=0.1, entropy_coef=0.01),
            critic=CriticSettings(shared=kind == "shared", learning_rate=1e-2, warmup_steps=1),
        )[0]
        for kind in ("shared", "own")
    }


def train_on_ranks(folder: str) -> None:
    torch.save(train(2), f"{folder}/{os.environ['LOCAL_RANK']}")


def test_two_ranks_train_the_critic_of_one(tmp_path):
    expected = train(1)
    run_ranks(2, train_on_ranks, str(tmp_path), output=tmp_path / "output")
    one, two = (torch.load(tmp_path / str(rank)) for rank in range(2))
    assert_same(one, two)
    for kind, weights in expected.items():
        assert any(name.startswith("critic.") for name in weights)
        for name, weight in weights.items():
            torch.testing.assert_close(one[kind][name], weight, rtol=0, atol=1e-9)


def test_the_quickstart_of_ppo_starts_from_the_same_policy_and_problems():
    ours, other = compose("ppo_quickstart"), compose("quickstart")
    assert ours.algo._target_.endswith("PPO")
    for section in ("model", "task", "data", "rollout", "evaluation", "seed"):
        assert ours[section] == other[section]
