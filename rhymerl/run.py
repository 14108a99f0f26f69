"""Whole runs from a resolved config: what `rhymerl fit`, `evaluate` and `export` do."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from rhymerl.callbacks import LiveProgress, SampleTable, Summary
from rhymerl.callbacks.summary import summary_table
from rhymerl.config import instantiate, save_config
from rhymerl.errors import ConfigError
from rhymerl.policy import restore

Result = dict[str, float | int | None]
_NEEDED_BYTES = 64 * 2**20


def fit(config: DictConfig) -> Result:
    """Train, evaluating before and after; leaves config, checkpoints, logs and summary.json in the run directory.

    Raises ConfigError for bad input before anything is computed.
    """
    run_dir = open_run_dir(config.run_dir)
    ckpt_path = checkpoint_path(config.ckpt_path, run_dir)
    _seed(config)
    datamodule = instantiate(config.data)
    module = instantiate(config.module)
    summary = Summary()
    trainer = build_trainer(config, run_dir, [summary, LiveProgress()])
    save_config(config, run_dir)
    if summary_needed := datamodule.has_validation and ckpt_path is None:
        summary.eval_before = _evaluate(trainer, module, datamodule)
    trainer.fit(module, datamodule, ckpt_path=ckpt_path)
    trainer.save_checkpoint(run_dir / "checkpoints" / "last.ckpt")
    if summary_needed or datamodule.has_validation:
        summary.eval_after = _evaluate(trainer, module, datamodule)
    result = summary.result()
    (run_dir / "summary.json").write_text(json.dumps(result, indent=2) + "\n")
    _say(result, run_dir)
    return result


def evaluate(config: DictConfig) -> dict[str, float]:
    """The validation metrics of the policy as it is, or as a checkpoint (`ckpt_path`) left it."""
    run_dir = Path(config.run_dir)
    ckpt_path = checkpoint_path(config.ckpt_path, run_dir)
    _seed(config)
    datamodule, module = instantiate(config.data), instantiate(config.module)
    trainer = instantiate({**OmegaConf.to_container(config.trainer, resolve=True), "logger": False,
                           "enable_checkpointing": False, "enable_progress_bar": False})  # fmt: skip
    metrics = trainer.validate(module, datamodule, ckpt_path=ckpt_path, verbose=False)
    return dict(metrics[0])


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
    samples = SampleTable(run_dir / "samples.jsonl")
    settings: dict[str, Any] = {
        **OmegaConf.to_container(config.trainer, resolve=True),  # type: ignore[dict-item]
        "callbacks": [*callbacks, samples, checkpoints],
        "logger": TensorBoardLogger(save_dir=run_dir, name="", version="tensorboard"),
        "default_root_dir": str(run_dir),
        "enable_progress_bar": False,
        "enable_model_summary": False,
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


def _seed(config: DictConfig) -> None:
    L.seed_everything(config.seed, verbose=False)


def _evaluate(trainer: L.Trainer, module: L.LightningModule, datamodule: Any) -> float:
    metrics = trainer.validate(module, datamodule, verbose=False)[0]
    return float(metrics["eval/reward"])


def _say(result: Result, run_dir: Path) -> None:
    console = Console()
    console.print(summary_table(result))
    console.print(f"Everything is in {run_dir}: summary.json, config.yaml, samples.jsonl, checkpoints/; curves: "
                  f"tensorboard --logdir {run_dir}", highlight=False, soft_wrap=True)  # fmt: skip
