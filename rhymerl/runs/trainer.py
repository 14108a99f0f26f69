"""The Lightning Trainer of a run, and its files in the run directory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only
from omegaconf import DictConfig

from rhymerl.callbacks import AcceptanceHistograms, AtomicCheckpointIO, Checkpoints, SampleTable
from rhymerl.config import construct, keep_former, recorded, resolved, save_config
from rhymerl.errors import ConfigError
from rhymerl.report.printing import say
from rhymerl.runs.loggers import loggers_of
from rhymerl.runs.resume import ResumePoint
from rhymerl.training.module import RhymeModule
from rhymerl.training.trainer import check_precision, make_trainer, with_environment

_NEVER = 2**31  # steps
_INSTEAD = {  # flags of the Trainer that a run sets itself
    "default_root_dir": "use run_dir",
    "val_check_interval": "use evaluation.every_n_steps",
    "check_val_every_n_epoch": "use evaluation.every_n_steps",
    "num_sanity_val_steps": "leave it out: where there is validation data, a run is evaluated before its first step",
    "enable_checkpointing": "use checkpoint.every_n_steps",
}
_DEFAULTS = {"check_val_every_n_epoch": 1}  # the Trainer's own, where it is not None


def build_trainer(
    config: DictConfig, run_dir: Path, callbacks: Sequence[L.Callback], *, point: ResumePoint | None = None
) -> L.Trainer:
    """Return the Lightning Trainer of a run: its loggers, checkpoints and a table of samples in the run directory.

    What TensorBoard's curves of a run that goes on from `point` have from its step on is replaced.
    """
    asked = resolved(config)["trainer"]
    for name, instead in _INSTEAD.items():
        if asked.get(name) not in (None, _DEFAULTS.get(name)):
            raise ConfigError(f"trainer.{name}={asked[name]!r}: a run sets this itself; {instead}")
    check_precision(asked["precision"])
    loggers = loggers_of(config, first_step=point.global_step if point is not None else None)
    curves = [each for each in loggers if isinstance(each, TensorBoardLogger)] if isinstance(loggers, list) else []
    callbacks = [*callbacks, *(_LastPoint(each, point) for each in curves if point is not None)]
    saves = {"directory": run_dir / "checkpoints", **resolved(config)["checkpoint"]}
    settings = {
        **asked,
        "callbacks": [
            *callbacks,
            *(asked.get("callbacks") or []),
            SampleTable(run_dir / "samples.jsonl"),
            AcceptanceHistograms(),
            construct(Checkpoints, saves, key="checkpoint"),
        ],
        "plugins": [*with_environment(asked.get("plugins")), AtomicCheckpointIO(checks=False)],
        "logger": loggers if loggers != [] else False,
        "default_root_dir": str(run_dir),
        "deterministic": config.trainer.deterministic or config.deterministic,
        "val_check_interval": _NEVER,  # the module knows itself when an evaluation is due
        "check_val_every_n_epoch": None,
        "num_sanity_val_steps": 0,
        "enable_checkpointing": True,
        "enable_progress_bar": False,  # a run has a bar of its own
        "enable_model_summary": asked.get("enable_model_summary") is True,
    }
    return make_trainer(settings)


class RunConfig(L.Callback):
    """Keeps the config with the run, once nothing can be wrong with it any more, and in each checkpoint."""

    def __init__(self, config: DictConfig, run_dir: Path, *, is_new: bool = True) -> None:
        self.config = config.copy()
        self.run_dir = run_dir
        if is_new:  # else it says where the run came from
            self.config.ckpt_path = None

    @property
    def state_key(self) -> str:
        """As checkpoints have always had it."""
        return "_RunConfig"

    def on_fit_start(self, trainer: Any, pl_module: L.LightningModule) -> None:
        """Log at the config's interval, else at each step: Lightning's default does not count."""
        every = self.config.trainer.log_every_n_steps
        trainer.log_every_n_steps = every if every is not None else 1

    def on_train_start(self, trainer: L.Trainer, pl_module: RhymeModule) -> None:  # type: ignore[override]
        if trainer.is_global_zero:
            former = keep_former(self.config, self.run_dir)
            save_config(self.config, self.run_dir)
            if former is not None:
                note(f"The former settings are in {former}")
            if (words := pl_module.backend.words()) is not None:  # its engine has just started
                note(words)

    def state_dict(self) -> dict[str, Any]:
        return {"config": recorded(self.config)}


class _LastPoint(L.Callback):
    """Adds the checkpoint's step to curves that were cut off there, without running an evaluation again."""

    def __init__(self, logger: TensorBoardLogger, point: ResumePoint) -> None:
        self.logger = logger
        self.point = point

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.logger.log_metrics(dict(self.point.logged), step=self.point.global_step)


@rank_zero_only
def note(words: str, *, is_bad: bool = False) -> None:
    """Print a line, on rank 0; in red where something is wrong."""
    say(words, style="red" if is_bad else None)
