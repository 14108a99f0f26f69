"""A step's metrics to Lightning's loggers. TensorBoard gets them as one event: one a metric takes it many times as long."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lightning.pytorch.loggers import TensorBoardLogger

if TYPE_CHECKING:
    from torch.utils.tensorboard.writer import FileWriter


def log_metrics(logger: Any, metrics: Mapping[str, float], step: int) -> None:
    """What `logger.log_metrics` does; called on all ranks, of which the first writes."""
    writer = _file_writer(logger)
    if writer is None:
        logger.log_metrics(dict(metrics), step=step)
        return
    from tensorboard.compat.proto.summary_pb2 import Summary

    values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
    writer.add_summary(Summary(value=values), step)


def _file_writer(logger: Any) -> FileWriter | None:
    """Of Lightning's own TensorBoard logger, as it comes; other ranks than the first have none."""
    if type(logger) is not TensorBoardLogger or logger._prefix:
        return None
    from torch.utils.tensorboard import SummaryWriter

    writer = logger.experiment
    return writer.file_writer if isinstance(writer, SummaryWriter) else None
