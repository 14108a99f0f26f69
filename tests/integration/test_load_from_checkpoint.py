"""`RhymeModule.load_from_checkpoint` makes the parts again, or says which of them to pass."""

from __future__ import annotations

import json

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from rhymerl import PromptDataModule, RhymeModule
from rhymerl.algos import GRPO
from rhymerl.drafters import NoDrafter
from rhymerl.errors import ConfigError
from rhymerl.models.policy import PolicySource
from rhymerl.rewards import Reward, exact_match
from rhymerl.tasks import RunningSum
from tests.integration.conftest import assert_same
from tests.integration.plain import DIGITS, QUIET, parts, saved
from tests.integration.rewards import digits


def test_load_from_checkpoint(model_dir, prompts, tmp_path):
    module, datamodule = parts(str(model_dir), prompts)
    saver = ModelCheckpoint(dirpath=tmp_path / "saved", every_n_epochs=1)
    L.Trainer(devices=1, max_epochs=1, callbacks=[saver], **QUIET).fit(module, datamodule)
    loaded = RhymeModule.load_from_checkpoint(saver.best_model_path)
    assert_same(dict(loaded.state_dict()), dict(module.state_dict()))
    assert loaded.rollout.max_tokens == 8
    assert loaded.num_tokens == module.num_tokens > 0
    saved = torch.load(saver.best_model_path, weights_only=True)
    assert saved["hyper_parameters"]["rewards"] == DIGITS
    assert json.loads(json.dumps(saved["hyper_parameters"])) == {
        **saved["hyper_parameters"],
        "update": {**saved["hyper_parameters"]["update"], "betas": [0.9, 0.999]},
    }


@pytest.mark.parametrize(
    "rewards",
    [digits, [digits], [Reward(digits, weight=2.0), exact_match], {"one": digits, "two": {"function": exact_match}}],
    ids=["function", "list", "Rewards", "mapping"],
)
def test_rewards_that_have_a_name_come_back_with_the_module(rewards, model_dir, prompts, tmp_path):
    """The task's own would otherwise take their place without a word."""
    module, _ = parts(str(model_dir), prompts, rewards=rewards)
    loaded = RhymeModule.load_from_checkpoint(saved(module, tmp_path / "a.ckpt"))
    again = RhymeModule.load_from_checkpoint(saved(loaded, tmp_path / "b.ckpt"))
    answers = []
    for each in (module, loaded, again):
        datamodule = PromptDataModule(task=RunningSum(difficulty=3, validation_size=4))
        trainer = L.Trainer(devices=1, logger=False, **QUIET)
        answers.append(trainer.validate(each, datamodule, verbose=False)[0])
        answers[-1]["names"] = [reward.name for reward in each._rewards]
    assert answers[0] == answers[1] == answers[2]
    assert answers[0]["eval/reward"] > 0


@pytest.mark.parametrize("call", ["fit", "validate"])
def test_rewards_without_a_name_are_asked_for_again(call, model_dir, prompts, tmp_path):
    nameless = Reward(lambda completion: digits(completion), where="main")
    module, datamodule = parts(str(model_dir), prompts, rewards={"nameless": nameless})
    path = saved(module, tmp_path / "a.ckpt")
    loaded = RhymeModule.load_from_checkpoint(path)
    assert_same(dict(loaded.state_dict()), dict(module.state_dict()))
    trainer = L.Trainer(devices=1, max_steps=1, logger=False, enable_checkpointing=False, **QUIET)
    with pytest.raises(ConfigError, match="^rewards: .*<lambda> .*; pass rewards= to load_from_checkpoint again$"):
        getattr(trainer, call)(loaded, datamodule)
    with pytest.raises(ConfigError, match="^rewards: "):
        trainer.validate(RhymeModule.load_from_checkpoint(saved(loaded, tmp_path / "b.ckpt")), datamodule)
    trainer.validate(RhymeModule.load_from_checkpoint(path, rewards=nameless), datamodule, verbose=False)


class Forgetful(NoDrafter):
    """Keeps no argument, so that nothing can tell what it was made with."""

    def __init__(self, *, size: int) -> None:
        pass


@pytest.mark.parametrize(
    ("name", "words"), [("model", "a Policy that was loaded already"), ("drafter", "Forgetful has no attribute 'size'")]
)
def test_parts_that_cannot_be_described_are_asked_for_again(name, words, model_dir, prompts, tmp_path):
    given = {"model": PolicySource(str(model_dir)).load(), "drafter": Forgetful(size=3)}[name]
    module, datamodule = parts(**{"model": str(model_dir), "prompts": prompts, name: given})
    L.Trainer(devices=1, max_steps=1, logger=False, enable_checkpointing=False, **QUIET).fit(module, datamodule)
    path = saved(module, tmp_path / "a.ckpt")
    with pytest.raises(ConfigError, match=f"^{name}: .*{words}.*; pass {name}= to load_from_checkpoint again$"):
        RhymeModule.load_from_checkpoint(path)
    loaded = RhymeModule.load_from_checkpoint(path, **{name: given})
    assert_same(dict(loaded.state_dict()), dict(module.state_dict()))


def test_a_checkpoint_holds_numbers_of_numpy(model_dir, prompts, tmp_path):
    module, _ = parts(str(model_dir), prompts, seed=np.int64(3), algo=GRPO(clip_high=np.float64(0.25)))
    loaded = RhymeModule.load_from_checkpoint(saved(module, tmp_path / "a.ckpt"), weights_only=True)
    assert (loaded.seed, loaded.algo.clip_high) == (3, 0.25)
