"""Warm start: train a small policy on a task's demonstrations, and save it as a Hugging Face directory."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from rhymerl.policy import Policy, PolicySource
from rhymerl.tasks.base import Task

IGNORE = -100


class DemonstrationLoader:
    """`num_steps` batches of demonstrations; batch `s` follows from (seed, s) alone, so a resumed run sees the same."""

    def __init__(self, task: Task, policy: Policy, *, batch_size: int, num_steps: int, seed: int) -> None:
        self.task = task
        self.policy = policy
        self.batch_size = batch_size
        self.num_steps = num_steps
        self.seed = seed
        self.step = 0

    def __len__(self) -> int:
        return self.num_steps

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        while self.step < self.num_steps:
            batch = self.batch(self.step)
            self.step += 1
            yield batch
        self.step = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]

    def batch(self, step: int) -> dict[str, Tensor]:
        """`input_ids`, `labels`, `attention_mask`, each [batch, time]; prompts carry no label."""
        source = random.Random(f"demonstrations/{self.seed}/{step}")
        problems = self.task.stream("warmstart", seed=source.getrandbits(62))
        rows = [next(problems) for _ in range(self.batch_size)]
        encode = self.policy.tokenizer.encode
        end = self.policy.tokenizer.eos_token_id
        prompts = [encode(row["prompt"], add_special_tokens=False) for row in rows]
        answers = [[*encode(self.task.demonstration(row, source), add_special_tokens=False), end] for row in rows]
        return {
            "input_ids": _pad([p + a for p, a in zip(prompts, answers, strict=True)], fill=end),
            "labels": _pad([[IGNORE] * len(p) + a for p, a in zip(prompts, answers, strict=True)], fill=IGNORE),
            "attention_mask": _pad([[1] * len(p + a) for p, a in zip(prompts, answers, strict=True)], fill=0),
        }


def _pad(rows: Sequence[Sequence[int]], *, fill: int) -> Tensor:
    width = max(map(len, rows))
    return torch.tensor([[*row, *[fill] * (width - len(row))] for row in rows])


class WarmstartModule(L.LightningModule):
    """Next-token cross-entropy on demonstrations: AdamW, a linear warm-up, then a linear decay to zero."""

    def __init__(self, policy: Policy, *, learning_rate: float, warmup_steps: int, num_steps: int) -> None:
        super().__init__()
        self.policy = policy
        self.model = policy.model
        self.learning_rate = learning_rate
        self.warmup_steps = warmup_steps
        self.num_steps = num_steps

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        logits = self.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=IGNORE)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.learning_rate, betas=(0.9, 0.95), weight_decay=0.01)

        def factor(step: int) -> float:
            warmup = min(1.0, (step + 1) / max(1, self.warmup_steps))
            return warmup * max(0.0, 1 - step / self.num_steps)

        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def warmstart(
    source: PolicySource,
    task: Task,
    *,
    out: str | Path,
    num_steps: int = 1_000,
    batch_size: int = 32,
    learning_rate: float = 2e-3,
    warmup_steps: int = 100,
    seed: int = 0,
    save_every: int = 500,
    progress: bool = True,
) -> Path:
    """Train `source` on `task` and save it to the directory `out`; an interrupted call goes on where it was.

    The state in between lives in `out/warmstart.ckpt` and is removed at the end.
    """
    L.seed_everything(seed, verbose=False)
    policy = source.load()
    out = Path(out)
    state = out / "warmstart.ckpt"
    module = WarmstartModule(policy, learning_rate=learning_rate, warmup_steps=warmup_steps, num_steps=num_steps)
    loader = DemonstrationLoader(task, policy, batch_size=batch_size, num_steps=num_steps, seed=seed)
    trainer = L.Trainer(
        max_steps=num_steps,
        accelerator="auto",
        devices=1,
        gradient_clip_val=1.0,
        logger=False,
        enable_model_summary=False,
        enable_progress_bar=progress,
        default_root_dir=out,
        callbacks=[
            ModelCheckpoint(
                dirpath=out, filename="warmstart", every_n_train_steps=save_every, enable_version_counter=False
            )
        ],
    )
    module.train()
    trainer.fit(module, train_dataloaders=loader, ckpt_path=str(state) if state.exists() else None)
    policy.save(out)
    state.unlink(missing_ok=True)
    return out
