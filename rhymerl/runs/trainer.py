"""The Lightning Trainer of a run, and its files in the run directory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only
from omegaconf import DictConfig, OmegaConf

from rhymerl.callbacks import AcceptanceHistograms, AtomicCheckpointIO, Checkpoints, SampleTable
from rhymerl.config import construct, instantiate, recorded, resolved, save_config
from rhymerl.config.dotted_names import is_dotted
from rhymerl.config.files import options, packaged_directory
from rhymerl.config.targets import import_target
from rhymerl.errors import ConfigError, did_you_mean, missing_package
from rhymerl.report.printing import say
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
_DEFAULT_LOGGER = "tensorboard"


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
            if (former := save_config(self.config, self.run_dir)) is not None:
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


def loggers_of(config: DictConfig, *, first_step: int | None = None) -> Any:
    """Return the loggers that `logger` asks for, or what Lightning's own flag `trainer.logger` says instead.

    TensorBoard's curves of a run that goes on are cut off at `first_step`, from which they are written anew. Raises
    ConfigError.
    """
    settings = resolved(config)
    asked, flag = settings["logger"], settings["trainer"].get("logger")
    if flag is not None and flag is not True:
        is_default = asked == _DEFAULT_LOGGER or (
            isinstance(asked, Mapping) and asked["_target_"] == _logger_node(_DEFAULT_LOGGER, config)["_target_"]
        )
        if asked and not is_default:
            raise ConfigError(f"trainer.logger={flag!r}: the run has `logger` already; expected null, or logger=null")
        return flag
    several = asked if isinstance(asked, list) else [asked] if asked else []
    return [_logger_of(_logger_node(each, config), first_step) for each in several]


def _logger_node(asked: object, config: DictConfig) -> dict[str, Any]:
    """Return a logger's node: of a packaged option, of a class by its dotted path, or as it is."""
    if isinstance(asked, Mapping) and "_target_" in asked:
        return dict(asked)
    folder = packaged_directory() / "logger"
    known = options([folder])
    if asked in known:
        option = OmegaConf.load(folder / f"{asked}.yaml")
        node: dict[str, Any] = resolved(OmegaConf.create({"run_dir": config.run_dir, "it": option}))["it"]
        return node
    if isinstance(asked, str) and is_dotted(asked):
        return {"_target_": asked}
    near = did_you_mean(str(asked), known)
    raise ConfigError(
        f"logger={asked!r}: expected {', '.join(known)}, a dotted class path, a mapping with _target_, or a list of these{near}"
    )


def _logger_of(node: dict[str, Any], first_step: int | None) -> Logger:
    if first_step is not None and import_target(node["_target_"], setting="logger") is TensorBoardLogger:
        node = {"purge_step": first_step, **node}
    try:
        logger = instantiate(node, key="logger")
    except ModuleNotFoundError as error:
        where = f"logger={node['_target_']}"
        if "wandb" in where.lower():
            raise missing_package("wandb", where) from error
        raise ConfigError(f"{where}: {' '.join(str(error).split())}") from error
    if not isinstance(logger, Logger):
        raise ConfigError(f"logger={node['_target_']}: expected a Lightning Logger, it is a {type(logger).__name__}")
    return logger
