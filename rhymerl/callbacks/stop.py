"""Stopping a run from outside, between two steps."""

from __future__ import annotations

from typing import Any, Protocol

import lightning as L


class StopRequest(Protocol):
    """Somebody who may want the run to end; a held one waits for the end of the step."""

    requested: bool

    def hold(self) -> None: ...
    def release(self) -> None: ...


class StopOnRequest(L.Callback):
    """Ends training, with a checkpoint, after the step in which `request.requested` became true on any rank."""

    def __init__(self, request: StopRequest) -> None:
        self.request = request

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.request.hold()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.strategy.reduce_boolean_decision(self.request.requested, all=False):
            self.request.requested = True  # maybe it was another rank's
            trainer.should_stop = True
            trainer.limit_val_batches = 0  # else Lightning validates before it stops

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.request.release()
