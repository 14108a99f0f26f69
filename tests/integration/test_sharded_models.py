"""Under `fsdp2`: language models beside towers, and a policy that learns from a teacher, as in one process."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from transformers import AutoModelForImageTextToText

from rhymerl import PromptDataModule, RhymeModule
from rhymerl.algos import GRPO, Distill
from rhymerl.backends.embedded import EmbeddedBackend
from rhymerl.callbacks import AtomicCheckpointIO, Checkpoints
from rhymerl.models.policy import PolicySource
from rhymerl.models.sharding import whole
from rhymerl.rollout import RolloutSettings
from rhymerl.runs.export import export
from rhymerl.testing import tiny_policy
from rhymerl.training.settings import UpdateSettings
from rhymerl.training.teacher import TeacherSettings
from tests.integration.ranked import run_ranks
from tests.integration.sharded import furthest, keep, kept
from tests.integration.training import PROMPTS, REWARD
from tests.models.windowed import InDouble
from tests.models.wrapped import WRAPPED, save_wrapped

STEPS = 2
DISTILL = "distill"


def save(kind: str, folder: Path) -> None:
    """Write the policy, and the teacher where there is one."""
    if kind in WRAPPED:
        save_wrapped(kind, folder / "model")
        return
    for name, seed in (("model", 0), ("teacher", 5)):
        policy = tiny_policy("starcoder2", seed=seed, use_bias=False, context=64, peaked=2.0)
        policy.save(folder / name)


def module_for(kind: str, folder: Path) -> RhymeModule:
    parts: dict[str, Any] = {"algo": GRPO(kl_coef=0.1)}
    if kind == DISTILL:
        parts = {"algo": Distill(reward_weight=0.5), "teacher": TeacherSettings(path=str(folder / "teacher"))}
    return RhymeModule(
        PolicySource(str(folder / "model"), dtype="float64"),
        rollout=RolloutSettings(group_size=4, max_tokens=16, stop_token_ids=(3, 5)),
        update=UpdateSettings(learning_rate=3e-3, micro_batch_tokens=60),
        rewards=REWARD,
        backend=EmbeddedBackend(whole_copy=True),
        **parts,
    )


def train(kind: str, folder: Path, *, size: int) -> dict[str, torch.Tensor]:
    """Return the weights of a run on so many ranks, whose weights come late; 0 is one process without sharding."""
    trainer = L.Trainer(
        max_steps=STEPS,
        strategy="fsdp2" if size else "auto",
        accelerator="cpu",
        devices=size or 1,
        callbacks=[Checkpoints(folder / "saves", every_n_steps=STEPS, keep=1)] if size else [],
        logger=False,
        enable_checkpointing=size > 0,
        enable_progress_bar=False,
        enable_model_summary=False,
        precision="64-true",
        plugins=[AtomicCheckpointIO()],
    )
    with trainer.init_module(empty_init=True) if size else nullcontext():
        module = module_for(kind, folder)
    with InDouble():
        trainer.fit(module, PromptDataModule(PROMPTS, prompts_per_step=3))
    return {name: whole(weight).clone() for name, weight in module.state_dict().items()}


def train_on_ranks(folder: str, kind: str) -> None:
    keep(train(kind, Path(folder), size=2), f"{folder}/weights")


def on_ranks(kind: str, folder: Path) -> dict[str, torch.Tensor]:
    run_ranks(2, train_on_ranks, str(folder), kind, output=folder / "output", timeout_s=500)
    found = kept(folder / "weights")
    assert furthest(kept(folder / "weights", 1), found) == 0.0
    return found


@pytest.mark.slow
def test_a_teacher_that_each_rank_has_a_part_of_teaches_the_same(tmp_path):
    torch.set_num_threads(1)
    save(DISTILL, tmp_path)
    before = PolicySource(str(tmp_path / "model"), dtype="float64").load().model.state_dict()
    alone, sharded = train(DISTILL, tmp_path, size=0), on_ranks(DISTILL, tmp_path)
    assert furthest(sharded, alone) < 1e-9
    assert furthest({f"model.{name}": each for name, each in before.items()}, alone) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gemma3", "qwen3_5"])
def test_a_model_beside_a_tower_is_trained_and_exported_whole(kind, tmp_path):
    torch.set_num_threads(1)
    save(kind, tmp_path)
    policy = PolicySource(str(tmp_path / "model"), dtype="float64").load()
    before = {f"model.{name}": each.clone() for name, each in policy.model.state_dict().items()}
    frozen = {f"model.{name}" for name, each in policy.model.named_parameters() if not each.requires_grad}
    alone, sharded = train(kind, tmp_path, size=0), on_ranks(kind, tmp_path)
    assert furthest(sharded, alone) < 1e-9
    changed = {name for name, each in sharded.items() if not torch.equal(each, before[name])}
    assert frozen
    assert changed
    assert not changed & frozen
    out = export(tmp_path / "saves" / "last.ckpt", tmp_path / "policy")
    exported = AutoModelForImageTextToText.from_pretrained(out, dtype=torch.float64).state_dict()
    assert furthest({f"model.{name}": each for name, each in exported.items()}, sharded) == 0.0
