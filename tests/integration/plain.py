"""Parts of runs by hand, with the usual flags of Lightning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import torch

from rhymerl import PromptDataModule, RhymeModule
from rhymerl.rollout import RolloutSettings
from rhymerl.training.settings import UpdateSettings

DIGITS = "tests.integration.rewards.digits"
QUIET = {"enable_progress_bar": False, "enable_model_summary": False, "log_every_n_steps": 1}


def parts(model: Any, prompts: Path, **more: Any) -> tuple[RhymeModule, PromptDataModule]:
    settings = {
        "rollout": RolloutSettings(group_size=4, max_tokens=8),
        "update": UpdateSettings(learning_rate=1e-2),
        "rewards": DIGITS,
        **more,
    }
    return RhymeModule(model, **settings), PromptDataModule(str(prompts), str(prompts), prompts_per_step=3)


def weights(module: L.LightningModule) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def num_changed(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> int:
    return sum(not torch.equal(before[name], after[name]) for name in before)


def saved(module: RhymeModule, path: Path) -> Path:
    """A checkpoint of the module as it is."""
    trainer = L.Trainer(devices=1, logger=False, enable_checkpointing=False, **QUIET)
    trainer.strategy.connect(module)
    trainer.save_checkpoint(path, weights_only=False)
    return path
