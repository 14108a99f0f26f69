"""Every rollout of a run on file, as `rhymerl replay` reads them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning as L
import torch

from rhymerl.history.traces import TraceWriter, record_of


class RecordRollouts(L.Callback):
    """Writes every answer of every step to `path`; its place in the file travels in the checkpoint.

    A resumed run cuts off the answers after its checkpoint, so the file equals an uninterrupted run's byte for byte.
    Without `continues` the run is in another directory than its checkpoint's, and its file begins with its first step.
    Needs a module with `last_rollout`, and a PromptDataModule.
    """

    def __init__(self, path: str | Path, *, continues: bool = True) -> None:
        self.path = Path(path)
        self.continues = continues
        self._num_bytes: int | None = None  # of what the run has recorded so far, None before its first step
        self._writer: TraceWriter | None = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Raises ConfigError for a file that the checkpoint knows nothing of, and DataError for one that is cut off."""
        if trainer.is_global_zero:
            self._writer = TraceWriter(self.path, keep_bytes=self._num_bytes)
            self._num_bytes = self._writer.num_bytes

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        rollout: Any = getattr(pl_module, "last_rollout", None)
        if self._writer is not None and rollout is not None:
            loader = trainer.datamodule.train_loader  # type: ignore[attr-defined]
            epoch = (loader.cursor - 1) // len(loader)  # it has moved on already
            with_waits = not torch.are_deterministic_algorithms_enabled()  # else the file is to repeat
            self._writer.write(record_of(sample, epoch, with_waits=with_waits) for sample in rollout.samples)
            self._num_bytes = self._writer.num_bytes

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._close()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._close()

    def _close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._writer = None

    def state_dict(self) -> dict[str, Any]:
        return {"num_bytes": self._num_bytes}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        if self.continues:
            self._num_bytes = state_dict["num_bytes"]
