"""Our side of a comparison, started by `compare.py`: RhymeModule under lightning.Trainer; prints one JSON line."""

from __future__ import annotations

import importlib.metadata
import json
import time
import warnings
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers import TensorBoardLogger

from benchmarks.against_trl import sides
from rhymerl.algos.grpo import GRPO
from rhymerl.backends.embedded import EmbeddedBackend
from rhymerl.data import PromptDataModule
from rhymerl.rewards import Reward
from rhymerl.rollout import RolloutSettings
from rhymerl.training.module import RhymeModule
from rhymerl.training.settings import UpdateSettings


class Clock(L.Callback):
    """Times from the end of a step to the end of the next, so that logging and data are in it."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self._last = 0.0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._last = time.perf_counter()

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *ignored: Any) -> None:
        now = time.perf_counter()
        metrics = pl_module.last_rollout.metrics
        self.steps.append(
            {
                "step_s": now - self._last,
                "rollout_s": metrics["timing_s/rollout"],
                "update_s": float(trainer.callback_metrics["timing_s/update"]),
                "reward": metrics["reward"],
                "length": metrics["completions/mean_length"],
            }
        )
        self._last = now


def main() -> None:
    arguments = sides.settings()
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    warnings.filterwarnings("ignore", module="lightning")
    L.seed_everything(arguments.seed, verbose=False)
    parts = {} if arguments.micro_batch_tokens is None else {"micro_batch_tokens": arguments.micro_batch_tokens}
    module = RhymeModule(
        str(arguments.policy),
        GRPO(),
        rollout=RolloutSettings(group_size=arguments.group_size, max_tokens=arguments.max_tokens),
        update=UpdateSettings(learning_rate=arguments.learning_rate, **parts),
        backend=EmbeddedBackend(max_running=arguments.prompts * arguments.group_size),  # side by side, as there
        rewards=Reward(arguments.reward, where=arguments.reward_where),
        seed=arguments.seed,
    )
    data = PromptDataModule(sides.rows_of(arguments), prompts_per_step=arguments.prompts, seed=arguments.seed)
    clock = Clock()
    trainer = L.Trainer(
        accelerator="cpu",
        max_steps=arguments.steps,
        log_every_n_steps=1,
        logger=TensorBoardLogger(save_dir=arguments.folder, name="", version="tensorboard"),
        callbacks=[clock],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, data)
    versions = {name: importlib.metadata.version(name) for name in ("rhymerl", "torch", "transformers", "lightning")}
    steps = {name: [step[name] for step in clock.steps] for name in clock.steps[0]}
    print(json.dumps({**steps, "versions": versions}))


if __name__ == "__main__":
    main()
