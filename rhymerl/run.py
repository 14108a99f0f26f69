"""Whole runs from a resolved config: what `rhymerl fit`, `evaluate` and `export` do."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table

from rhymerl.callbacks import LiveProgress, SampleTable, Summary
from rhymerl.callbacks.summary import summary_table
from rhymerl.config import instantiate, resolved, save_config
from rhymerl.errors import ConfigError
from rhymerl.policy import restore

Result = dict[str, float | int | None]
_NEEDED_BYTES = 64 * 2**20
_NEVER = 2**31  # steps
_QUIET = {"enable_progress_bar": False, "enable_model_summary": False}


def fit(config: DictConfig, *, on_trainer: Callable[[L.Trainer], None] | None = None) -> Result:
    """Train, evaluating before and after; leaves config, checkpoints, logs and summary.json in the run directory.

    `on_trainer` gets the Trainer before anything runs; a run that it stops early (`should_stop`) is saved but not
    evaluated. Raises ConfigError and DataError for bad input before anything is computed.
    """
    run_dir = open_run_dir(config.run_dir)
    ckpt_path = checkpoint_path(config.ckpt_path, run_dir)
    datamodule, module = _parts(config)
    summary = Summary()
    trainer = build_trainer(config, run_dir, [summary, LiveProgress()])
    if on_trainer is not None:
        on_trainer(trainer)
    save_config(config, run_dir)
    if datamodule.has_validation and ckpt_path is None:
        summary.eval_before = _evaluate(trainer, module, datamodule)
    trainer.fit(module, datamodule, ckpt_path=ckpt_path)
    trainer.save_checkpoint(run_dir / "checkpoints" / "last.ckpt")
    if datamodule.has_validation and not trainer.should_stop:
        summary.eval_after = _evaluate(trainer, module, datamodule)
    result = summary.result()
    (run_dir / "summary.json").write_text(json.dumps(result, indent=2) + "\n")
    _say(result, run_dir)
    return result


def evaluate(config: DictConfig) -> dict[str, float]:
    """The validation metrics of the policy as it is, or as a checkpoint (`ckpt_path`) left it."""
    ckpt_path = checkpoint_path(config.ckpt_path, Path(config.run_dir))
    datamodule, module = _parts(config)
    settings = {**resolved(config)["trainer"], "logger": False, "enable_checkpointing": False, **_QUIET}
    metrics = instantiate(settings).validate(module, datamodule, ckpt_path=ckpt_path, verbose=False)[0]
    table = Table(title="Evaluation", title_justify="left", show_header=False)
    for name, value in metrics.items():
        table.add_row(name, f"{value:.4g}")
    Console().print(table)
    return dict(metrics)


def export(run: str | Path, out: str | Path) -> Path:
    """Write the policy of a run directory's last checkpoint (or of a checkpoint file) as a Hugging Face directory."""
    run = Path(run)
    path = run if run.is_file() else run / "checkpoints" / "last.ckpt"
    if not path.is_file():
        raise ConfigError(f"{str(run)!r}: neither a checkpoint nor a run directory with checkpoints/last.ckpt")
    checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    if "rhymerl" not in checkpoint:
        raise ConfigError(f"{str(path)!r}: not a checkpoint of rhymerl")
    weights = {k.removeprefix("model."): v for k, v in checkpoint["state_dict"].items() if k.startswith("model.")}
    out = open_run_dir(out)
    restore(checkpoint["rhymerl"]["policy_files"], weights, out)
    return out


def build_trainer(config: DictConfig, run_dir: Path, callbacks: list[L.Callback]) -> L.Trainer:
    """The Lightning Trainer of a run: TensorBoard, checkpoints and a table of samples in the run directory."""
    checkpoints = ModelCheckpoint(
        dirpath=run_dir / "checkpoints",
        filename="{step}",
        monitor="step",
        mode="max",
        save_top_k=config.checkpoint.keep,
        every_n_train_steps=config.checkpoint.every_n_steps,
        save_last=True,
        enable_version_counter=False,
    )
    settings = {
        **resolved(config)["trainer"],
        "callbacks": [*callbacks, SampleTable(run_dir / "samples.jsonl"), checkpoints],
        "logger": TensorBoardLogger(save_dir=run_dir, name="", version="tensorboard"),
        "default_root_dir": str(run_dir),
        "deterministic": config.trainer.deterministic or config.deterministic,
        "val_check_interval": config.evaluation.every_n_steps or _NEVER,
        "check_val_every_n_epoch": None,
        "num_sanity_val_steps": 0,
        **_QUIET,
    }
    trainer: L.Trainer = instantiate(settings)
    return trainer


def open_run_dir(name: str | Path) -> Path:
    """Make the directory if need be. Raises ConfigError when it cannot be written to or the disk is full."""
    path = Path(name)
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe = path / ".rhymerl-write-test"
        probe.write_bytes(b"x" * 4096)
        probe.unlink()
    except OSError as error:
        reason = "no space left on the disk" if error.errno == errno.ENOSPC else error.strerror
        raise ConfigError(f"run_dir={str(name)!r}: {reason}; give a directory that can be written to") from error
    free = shutil.disk_usage(path).free
    if free < _NEEDED_BYTES:
        raise ConfigError(f"run_dir={str(name)!r}: {free / 2**20:.0f} MiB of disk left, at least 64 are needed")
    return path


def checkpoint_path(setting: str | None, run_dir: Path) -> str | None:
    """`last` means the run directory's own; any other value is a file. Raises ConfigError when it is not there."""
    if setting is None:
        return None
    path = run_dir / "checkpoints" / "last.ckpt" if setting == "last" else Path(setting)
    if not path.is_file():
        raise ConfigError(f"ckpt_path={setting!r}: there is no file {str(path)!r}")
    return str(path)


def _parts(config: DictConfig) -> tuple[Any, Any]:
    """The data module and the module."""
    L.seed_everything(config.seed, verbose=False)
    return instantiate(config.data), instantiate(config.module)


def _evaluate(trainer: L.Trainer, module: L.LightningModule, datamodule: Any) -> float:
    metrics = trainer.validate(module, datamodule, verbose=False)[0]
    return float(metrics["eval/reward"])


def _say(result: Result, run_dir: Path) -> None:
    console = Console()
    console.print(summary_table(result))
    console.print(f"Everything is in {run_dir}: summary.json, config.yaml, samples.jsonl, checkpoints/; curves: "
                  f"tensorboard --logdir {run_dir}", highlight=False, soft_wrap=True)  # fmt: skip
