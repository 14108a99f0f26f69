"""A step's metrics for Lightning's loggers, in one TensorBoard event: an event per metric takes much longer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch.loggers import TensorBoardLogger
from torch.utils.tensorboard.writer import FileWriter


def log_step(trainer: Any, metrics: Mapping[str, float], num_rollouts: int) -> dict[str, float]:
    """Log to the loggers every `log_every_n_steps` and to a bar; return what the loggers got.

    Callbacks that monitor a metric find it in `trainer.callback_metrics`. A module's `log` is not used: its bookkeeping
    of each metric costs more than a small model's forward pass.
    """
    trainer.callback_metrics.update({name: torch.tensor(value) for name, value in metrics.items()})
    if trainer.progress_bar_callback is not None:
        shown = {"reward": "reward", "length": "completions/mean_length"}
        trainer.progress_bar_metrics.update({name: metrics[key] for name, key in shown.items() if key in metrics})
    every = trainer.log_every_n_steps
    if not every or (num_rollouts % every and not trainer.should_stop):
        return {}
    for logger in trainer.loggers:
        log_metrics(logger, metrics, trainer.global_step)
    return {name: float(value) for name, value in metrics.items()}


def log_metrics(logger: Any, metrics: Mapping[str, float], step: int) -> None:
    """Log as `logger.log_metrics` does; called on all ranks, of which the first writes."""
    writer = _file_writer(logger)
    if writer is None:
        logger.log_metrics(dict(metrics), step=step)
        return
    from tensorboard.compat.proto.summary_pb2 import Summary

    values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
    writer.add_summary(Summary(value=values), step)


def _file_writer(logger: Any) -> FileWriter | None:
    """Return the writer of Lightning's own TensorBoard logger, as it comes; other ranks than the first have none."""
    if type(logger) is not TensorBoardLogger or logger._prefix:
        return None
    from torch.utils.tensorboard import SummaryWriter

    writer = logger.experiment
    return writer.file_writer if isinstance(writer, SummaryWriter) else None
