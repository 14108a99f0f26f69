"""A table of samples every N steps: in a JSONL file, in TensorBoard, and nowhere in the way."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.loggers import TensorBoardLogger

from rhymerl.types import Sample


class SampleTable(L.Callback):
    """Appends `num_samples` answers to `path` and to TensorBoard's text tab every `every_n_steps` rollout steps."""

    def __init__(self, path: str | Path, *, every_n_steps: int = 10, num_samples: int = 4) -> None:
        self.path = Path(path)
        self.every_n_steps = every_n_steps
        self.num_samples = num_samples

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Drop the rows of steps that a resumed run is about to repeat."""
        if trainer.is_global_zero and self.path.exists():
            done = int(getattr(pl_module, "num_rollouts", 0))
            part = self.path.with_name(f".{self.path.name}.part")
            with self.path.open(encoding="utf-8") as rows, part.open("w", encoding="utf-8") as kept:
                kept.writelines(row for row in rows if row.endswith("\n") and json.loads(row)["step"] <= done)
            part.replace(self.path)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        rollout = getattr(pl_module, "last_rollout", None)
        step = int(getattr(pl_module, "num_rollouts", 0))
        if rollout is None or not trainer.is_global_zero or (step - 1) % self.every_n_steps:
            return
        # A stride, so that the samples are not all of one group.
        chosen = rollout.samples[:: max(1, len(rollout.samples) // self.num_samples)][: self.num_samples]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.writelines(
                json.dumps({"step": step, **sample_row(sample)}, ensure_ascii=False) + "\n" for sample in chosen
            )
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                logger.experiment.add_text("samples", markdown_table(chosen), trainer.global_step)


def sample_row(sample: Sample) -> dict[str, Any]:
    """What a person wants to see of a sample."""
    return {
        "prompt": sample.prompt.text,
        "response": sample.text,
        "reward": round(sample.reward, 4),
        "length": len(sample),
        "finish_reason": sample.completion.finish_reason,
    }


def markdown_table(samples: Sequence[Sample]) -> str:
    """The samples as a Markdown table."""
    rows = [sample_row(sample) for sample in samples]
    header = list(rows[0])
    lines = [header, ["---"] * len(header), *([_cell(value) for value in row.values()] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", "⏎ ")
