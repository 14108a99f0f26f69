"""Short float64 runs under a strategy, with embedded engines in threads of rank 0 or a whole copy in each rank."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.plugins.precision import DoublePrecision
from torch import Tensor

from benchmarks.emulation.threads import ThreadBackend
from rhymerl import PromptDataModule, RhymeModule
from rhymerl.algos import GRPO, PPO
from rhymerl.backends.embedded import EmbeddedBackend
from rhymerl.callbacks import AtomicCheckpointIO, Checkpoints
from rhymerl.drafters import HistoryTreeDrafter, NoDrafter
from rhymerl.models.critic import CriticSettings
from rhymerl.models.lora import LoRA
from rhymerl.models.sharding import whole
from rhymerl.rollout import RolloutSettings
from rhymerl.testing import tiny_policy
from rhymerl.training.fsdp2 import FSDP2Strategy
from rhymerl.training.settings import UpdateSettings
from tests.integration.training import PROMPTS, REWARD

STEPS = 5
KINDS = ("grpo", "ppo", "lora")


def module_for(kind: str, *, is_alone: bool, drafts: bool, dtype: str, whole_copy: bool) -> RhymeModule:
    # The norms of other families compute in float32, and biases of keys have no gradient: Adam would blow up what
    # rounding leaves there.
    policy = tiny_policy("starcoder2", dtype=dtype, use_bias=False, context=64, peaked=2.0, tied=kind == "grpo")
    parts: dict[str, Any] = {"algo": GRPO(kl_coef=0.1)}
    if kind == "ppo":
        parts = {"algo": PPO(), "critic": CriticSettings(learning_rate=1e-3)}
    if kind == "lora":
        LoRA(rank=4).put_on(policy.model, seed=1)
    return RhymeModule(
        policy,
        rollout=RolloutSettings(group_size=4, max_tokens=16, stop_token_ids=(3, 5)),
        update=UpdateSettings(learning_rate=3e-3, mini_batches=2, micro_batch_tokens=60),
        rewards=REWARD,
        drafter=HistoryTreeDrafter() if drafts else NoDrafter(),
        backend=EmbeddedBackend(whole_copy=whole_copy)
        if is_alone or whole_copy
        else ThreadBackend(lambda number: EmbeddedBackend()),
        **parts,
    )


def train(
    strategy: str,
    kind: str,
    *,
    size: int = 1,
    num_steps: int = STEPS,
    saves: Path | None = None,
    drafts: bool = True,
    precision: str | None = None,
    ckpt_path: Path | None = None,
    callbacks: Sequence[L.Callback] = (),
    whole_copy: bool = False,
    **flags: Any,
) -> Mapping[str, Tensor]:
    """Return the weights, whole on each of `size` ranks, of a run that may save each step and go on from a checkpoint.

    The strategy is alone, ddp, fsdp2, or hsdp with two replicas; without a `precision` all is in float64.
    """
    dtype = "float64" if precision is None else "float32"
    module = module_for(kind, is_alone=strategy == "alone", drafts=drafts, dtype=dtype, whole_copy=whole_copy)
    # Lightning takes no 64-true beside such a strategy as an object.
    plugins = [DoublePrecision()] if strategy == "hsdp" and precision is None else []
    saving = [Checkpoints(saves, every_n_steps=1, keep=2)] if saves is not None else []
    trainer = L.Trainer(
        max_steps=2 * num_steps,
        callbacks=[*saving, *callbacks],
        strategy={"alone": "auto", "hsdp": FSDP2Strategy(num_replicas=2)}.get(strategy, strategy),
        accelerator="cpu",
        devices=size,
        logger=False,
        enable_checkpointing=saves is not None,
        enable_progress_bar=False,
        enable_model_summary=False,
        precision=None if plugins else precision or "64-true",
        plugins=[*plugins, AtomicCheckpointIO()],
        **flags,
    )
    trainer.fit(module, PromptDataModule(PROMPTS, prompts_per_step=3), ckpt_path=ckpt_path, weights_only=True)
    return {name: whole(weight).clone() for name, weight in module.state_dict().items()}


def keep(weights: Mapping[str, Tensor], path: str | Path) -> None:
    """Write them to a file of this rank."""
    torch.save(dict(weights), f"{path}.{os.environ.get('LOCAL_RANK', 0)}")


def kept(path: str | Path, rank: int = 0) -> dict[str, Tensor]:
    found: dict[str, Tensor] = torch.load(f"{path}.{rank}")
    return found


def furthest(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """The largest difference of two weights."""
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)
