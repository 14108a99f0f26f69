"""Warm start: train a small policy on a task's demonstrations, and save it as a Hugging Face directory."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Checkpoint
from torch import Tensor

from rhymerl.callbacks import AtomicCheckpointIO, LiveProgress
from rhymerl.config import describe
from rhymerl.data.base import LocatedRow
from rhymerl.data.encoding import PromptEncoder
from rhymerl.environments.encoding import ReplyEncoder
from rhymerl.errors import ConfigError, require_at_least
from rhymerl.folders import open_folder
from rhymerl.models.policy import Policy, PolicySource
from rhymerl.tasks.base import Row, Task
from rhymerl.training.trainer import with_environment

IGNORE = -100
Precision = Literal["32-true", "bf16-mixed"]  # weights are float32 in both


@dataclass(eq=False)
class DemonstrationLoader:
    """`num_steps` batches of demonstrations; batch `s` follows from (seed, s) alone, so a resumed run sees the same."""

    task: Task
    policy: Policy
    _: KW_ONLY
    batch_size: int
    num_steps: int
    seed: int

    def __post_init__(self) -> None:
        self.encoder = PromptEncoder(self.policy.tokenizer)
        self.replies = ReplyEncoder(self.encoder.chat)
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
        """Return `input_ids`, `labels`, `attention_mask`, each [batch, time]; prompts and replies have no labels."""
        source = random.Random(f"demonstrations/{self.seed}/{step}")
        problems = self.task.stream("warmstart", seed=source.getrandbits(62))
        rows = [next(problems) for _ in range(self.batch_size)]
        tokens, labels = zip(*(self._demonstration(row, source) for row in rows), strict=True)
        return {
            "input_ids": _pad(tokens, fill=self.policy.tokenizer.eos_token_id),
            "labels": _pad(labels, fill=IGNORE),
            "attention_mask": _pad([[1] * len(each) for each in tokens], fill=0),
        }

    def _demonstration(self, row: Row, source: random.Random) -> tuple[list[int], list[int]]:
        """Return the tokens of a prompt, encoded as for rollouts, and of an answer to it; and their labels."""
        prompt = self.encoder.encode(LocatedRow(location="a demonstration", row=row), prompt_id="")
        tokens = [int(token) for token in prompt.token_ids]
        labels = [IGNORE] * len(tokens)
        shown = self.task.demonstration(row, source)
        messages = [{"role": "assistant", "content": shown}] if isinstance(shown, str) else shown
        for is_said, group in groupby(messages, key=lambda message: message["role"] == "assistant"):
            turn = list(group)
            new = self._said(turn) if is_said else self._replied(turn, is_chat=prompt.is_chat)
            tokens += new
            labels += new if is_said else [IGNORE] * len(new)
        return tokens, labels

    def _said(self, messages: Iterable[Mapping[str, str]]) -> list[int]:
        text = "".join(message["content"] for message in messages)
        return [*self.policy.tokenizer.encode(text, add_special_tokens=False), self.policy.tokenizer.eos_token_id]

    def _replied(self, messages: Sequence[Mapping[str, str]], *, is_chat: bool) -> list[int]:
        reply = messages if is_chat else "".join(message["content"] for message in messages)
        end = self.policy.tokenizer.eos_token_id
        _, token_ids = self.replies.encode(reply, is_chat=is_chat, ended_by=end, location="a demonstration")
        return [int(token) for token in token_ids]


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
        logits = self.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits.float()
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
    precision: Precision = "32-true",
    progress: bool = True,
    callbacks: Sequence[L.Callback] = (),
) -> Path:
    """Train `source` on `task` and save it to the directory `out`; an interrupted call goes on where it was.

    The state in between lives in `out/warmstart.ckpt` and is removed at the end. `precision` is the Trainer's:
    "bf16-mixed" is faster where the device multiplies in bfloat16. Raises ConfigError when `out` holds a model already,
    or the state of a call with other settings.
    """
    least = {"num_steps": (num_steps, 1), "batch_size": (batch_size, 1), "save_every": (save_every, 1)}
    require_at_least(least)
    try:
        task.demonstration(next(task.stream("warmstart", seed=seed)), random.Random(seed))
    except TypeError as error:
        raise ConfigError(f"task: {error}") from error
    out = open_folder(out, setting="out")
    if (out / "config.json").exists():
        raise ConfigError(f"out={str(out)!r}: holds a model already; remove it or give another directory")
    state = out / "warmstart.ckpt"
    settings = {
        "source": describe(source),
        "task": describe(task),
        "num_steps": num_steps,
        "batch_size": batch_size,
        "learning_rate": learning_rate,
        "warmup_steps": warmup_steps,
        "seed": seed,
        "precision": precision,
    }
    if state.exists():
        _check_same_settings(state, settings)
    L.seed_everything(seed, verbose=False)
    policy = source.load()
    module = WarmstartModule(policy, learning_rate=learning_rate, warmup_steps=warmup_steps, num_steps=num_steps)
    loader = DemonstrationLoader(task, policy, batch_size=batch_size, num_steps=num_steps, seed=seed)
    trainer = L.Trainer(
        max_steps=num_steps,
        accelerator="auto",
        devices=1,
        precision=precision,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=True,
        enable_model_summary=False,
        enable_progress_bar=False,
        default_root_dir=out,
        callbacks=[
            *callbacks,
            *([LiveProgress(lines_every=100)] if progress else []),
            _State(state, save_every, settings),
        ],
        plugins=with_environment([AtomicCheckpointIO()]),
    )
    module.train()
    trainer.fit(module, train_dataloaders=loader, ckpt_path=str(state) if state.exists() else None, weights_only=True)
    if trainer.global_step < num_steps:
        return out
    policy.save(out)
    state.unlink(missing_ok=True)
    return out


class _State(Checkpoint):
    """One file, written over every `every` steps and after the last; it remembers the settings that it belongs to."""

    def __init__(self, path: Path, every: int, settings: dict[str, Any]) -> None:
        self.path = path
        self.every = every
        self.settings = settings

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.should_stop or trainer.global_step % self.every == 0:
            trainer.save_checkpoint(self.path, weights_only=False)

    def state_dict(self) -> dict[str, Any]:
        return {"settings": self.settings}


def _check_same_settings(path: Path, settings: dict[str, Any]) -> None:
    saved = torch.load(path, map_location="cpu", mmap=True, weights_only=True)["callbacks"]["_State"]["settings"]
    for name, value in settings.items():
        if saved.get(name) != value:
            raise ConfigError(
                f"out={str(path.parent)!r}: holds the state of an interrupted warm start with another {name} "
                f"({saved.get(name)!r}, now {value!r}); take that, or give another directory"
            )
