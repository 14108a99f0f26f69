"""Every algorithm that comes as a config trains, and so does every switch: three steps of two mini-batches."""

from __future__ import annotations

import math

import pytest
import torch
from lightning import Trainer

from rhymerl import PromptDataModule, Reward, RhymeModule, RolloutSettings, UpdateSettings
from rhymerl.config import compose, instantiate
from rhymerl.config.files import packaged_directory
from rhymerl.tasks import RunningSum
from rhymerl.testing import tiny_policy
from rhymerl.training.teacher import TeacherSettings

CONFIGS = sorted(path.stem for path in packaged_directory().glob("algo/*.yaml"))
SWITCHES = [
    ["algo.dual_clip=3.0", "algo.entropy_coef=0.01", "algo.mask_truncated=true", "algo.max_kl=10.0"],
    ["algo.kl_coef=0.1", "algo.kl_estimator=k2", "algo.correction=masked", "algo.correction_level=sequence"],
    ["algo.kl_coef=0.1", "algo.kl_unbiased=false", "algo.correction=none", "algo.scale=batch"],
    ["algo=rloo", "algo.kl_target=6.0", "algo.correction_cap=null"],
    ["algo=reinforce_plus_plus", "algo.baseline=group"],
    ["algo=ppo", "algo.kl_target=6.0", "algo.value_clip=null", "algo.gamma=0.99"],
    ["algo=ppo", "algo.bootstrap_truncated=true"],
]


def distinct_letters(completion: str) -> float:
    return float(len(set(completion)))


@pytest.mark.filterwarnings("ignore::UserWarning")  # Lightning's advice
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("overrides", [*([f"algo={name}"] for name in CONFIGS), *SWITCHES], ids="+".join)
def test_it_trains(overrides, tmp_path):
    policy = tiny_policy(dtype="float32")
    tiny_policy(dtype="float32", seed=1).save(tmp_path)
    algo = instantiate(compose("base", overrides).algo)
    before = [parameter.detach().clone() for parameter in policy.model.parameters()]
    module = RhymeModule(
        policy,
        algo,
        teacher=TeacherSettings(path=str(tmp_path) if algo.needs_teacher else None),
        rollout=RolloutSettings(group_size=3, max_tokens=6, stop_token_ids=(3, 5, 7, 9, 11, 13)),
        update=UpdateSettings(learning_rate=1e-3, mini_batches=2),
        rewards=Reward(distinct_letters, where="main"),
    )
    data = PromptDataModule(task=RunningSum(difficulty=2, train_size=6, validation_size=2), prompts_per_step=2)
    trainer = Trainer(
        max_steps=6,
        accelerator="cpu",
        logger=False,
        limit_val_batches=0,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, data)
    assert trainer.global_step == 6
    assert math.isfinite(trainer.callback_metrics["loss"])
    after = list(policy.model.parameters())
    assert all(parameter.isfinite().all() for parameter in after)
    assert not all(torch.equal(old, new) for old, new in zip(before, after, strict=True))
