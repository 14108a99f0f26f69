"""Whole runs from a resolved config: what `rhymerl fit`, `evaluate` and `export` do."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only
from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table

from rhymerl.backends.embedded import EmbeddedBackend
from rhymerl.budgets import GoodputBudget
from rhymerl.callbacks import AtomicCheckpointIO, Checkpoints, LiveProgress, RecordRollouts, SampleTable, Summary
from rhymerl.callbacks.summary import summary_table
from rhymerl.config import instantiate, resolved, save_config
from rhymerl.data import PromptDataModule
from rhymerl.drafters.history_tree import HistoryTreeDrafter
from rhymerl.drafters.none import NoDrafter
from rhymerl.earlier import save_history, start_with
from rhymerl.errors import ConfigError
from rhymerl.folders import open_folder, refuse_second_run
from rhymerl.module import RhymeModule
from rhymerl.policy import restore
from rhymerl.ranks.first import is_first_rank
from rhymerl.speedup import measure_speedup
from rhymerl.trainer import check_precision, check_trainer, with_environment

Result = dict[str, float | int | None]
_NEVER = 2**31  # steps
_QUIET = {"enable_progress_bar": False, "enable_model_summary": False}
_INSTEAD = {  # flags of the Trainer that a run sets itself
    "default_root_dir": "run_dir",
    "val_check_interval": "evaluation.every_n_steps",
    "enable_checkpointing": "checkpoint.every_n_steps",
}


def fit(config: DictConfig, *, callbacks: Sequence[L.Callback] = ()) -> Result:
    """Train, evaluating before and after; rank 0 leaves config, checkpoints, logs and summary.json in the run directory.

    A run that a callback stops early (`should_stop`) is saved but not evaluated. Raises ConfigError and DataError for
    bad input before anything is computed or overwritten.
    """
    run_dir = Path(config.run_dir)
    ckpt_path = checkpoint_path(config.ckpt_path, run_dir)
    continues = ckpt_path is not None and run_dir.resolve() in ckpt_path.resolve().parents
    if is_first_rank():  # nobody else writes, and a default run_dir has the time in its name
        open_folder(run_dir)
        if not continues:
            refuse_second_run(run_dir)
    checkpoint = read_checkpoint(ckpt_path) if ckpt_path is not None else None
    summary = Summary()
    recorder = [RecordRollouts(run_dir / "rollouts.jsonl.gz", continues=continues)] if config.record_rollouts else []
    trainer = build_trainer(
        config,
        run_dir,
        [summary, LiveProgress(), *recorder, _RunConfig(config, run_dir), *callbacks],
        first_step=checkpoint["global_step"] if checkpoint else None,
    )
    check_trainer(trainer)
    datamodule, module = _parts(config)
    datamodule.prepare_for(module)
    module.check(datamodule)
    evaluates = datamodule.has_validation and trainer.limit_val_batches != 0
    if checkpoint is not None:
        check_same_run(checkpoint, module, datamodule, ckpt_path)
        _note(f"Going on from {ckpt_path}, after step {checkpoint['rhymerl']['num_rollouts']}")
        del checkpoint
    _take_up_history(config, module, datamodule)
    with module.one_engine():
        if ckpt_path is None and evaluates:
            summary.eval_before = _evaluate(trainer, module, datamodule)
        trainer.fit(module, datamodule, ckpt_path=ckpt_path, weights_only=True)
        if evaluates and not trainer.should_stop:
            summary.eval_after = _evaluate(trainer, module, datamodule)
    if not trainer.is_global_zero:
        return summary.result()
    _write_summary(summary.result(), run_dir)
    save_history(run_dir / "history.rhyme", module, datamodule)
    if not trainer.should_stop and summary.num_steps:
        step_s = summary.seconds["rollout"] / summary.num_steps
        summary.rollout_speedup = _speedup(config, trainer, module, datamodule, step_s)
    result = summary.result()
    _write_summary(result, run_dir)
    _say(result, run_dir)
    return result


def evaluate(config: DictConfig) -> dict[str, float]:
    """The validation metrics of the policy as it is, or as a checkpoint (`ckpt_path`) left it."""
    ckpt_path = checkpoint_path(config.ckpt_path, Path(config.run_dir))
    checkpoint = read_checkpoint(ckpt_path) if ckpt_path is not None else None
    asked = resolved(config)["trainer"]
    plugins = with_environment(asked.get("plugins"))
    settings = {**asked, "plugins": plugins, "logger": False, "enable_checkpointing": False, **_QUIET}
    trainer: L.Trainer = instantiate(settings, key="trainer")
    check_trainer(trainer)
    if trainer.limit_val_batches == 0:
        raise ConfigError("trainer.limit_val_batches=0: leaves nothing to evaluate; expected more, or null for all")
    datamodule, module = _parts(config)
    datamodule.prepare_for(module, with_train=False)
    module.check(datamodule)
    if checkpoint is not None:
        weights = _of_policy(checkpoint["state_dict"])
        _check_weights(weights, module.model.state_dict(), ckpt_path)
        module.model.load_state_dict(weights)
    metrics = trainer.validate(module, datamodule, verbose=False)[0]
    _show(metrics)
    return dict(metrics)


def export(run: str | Path, out: str | Path) -> Path:
    """Write the policy of a run directory's last checkpoint (or of a checkpoint file) as a Hugging Face directory."""
    run = Path(run)
    path = run if run.is_file() else run / "checkpoints" / "last.ckpt"
    if not path.is_file():
        raise ConfigError(f"RUN={str(run)!r}: neither a checkpoint nor a run directory with checkpoints/last.ckpt")
    checkpoint = read_checkpoint(path, setting="RUN")
    folder = open_folder(out, setting="OUT")
    restore(checkpoint["rhymerl"]["policy_files"], _of_policy(checkpoint["state_dict"]), folder)
    return folder


def build_trainer(
    config: DictConfig, run_dir: Path, callbacks: Sequence[L.Callback], *, first_step: int | None = None
) -> L.Trainer:
    """The Lightning Trainer of a run: TensorBoard, checkpoints and a table of samples in the run directory.

    `first_step` is that of a resumed run: what its curves have from there on is replaced.
    """
    asked = resolved(config)["trainer"]
    for name, instead in _INSTEAD.items():
        if asked.get(name) is not None:
            raise ConfigError(f"trainer.{name}={asked[name]!r}: a run sets this itself; use {instead}")
    check_precision(asked["precision"])
    logger = asked.get("logger")
    if logger is None or logger is True:
        logger = TensorBoardLogger(save_dir=run_dir, name="", version="tensorboard", purge_step=first_step)
    every_n_steps, keep = config.checkpoint.every_n_steps, config.checkpoint.keep
    settings = {
        **asked,
        "callbacks": [
            *callbacks,
            *(asked.get("callbacks") or []),
            SampleTable(run_dir / "samples.jsonl"),
            Checkpoints(run_dir / "checkpoints", every_n_steps=every_n_steps, keep=keep),
        ],
        "plugins": [*with_environment(asked.get("plugins")), AtomicCheckpointIO()],
        "logger": logger,
        "default_root_dir": str(run_dir),
        "deterministic": config.trainer.deterministic or config.deterministic,
        "val_check_interval": config.evaluation.every_n_steps or _NEVER,
        "check_val_every_n_epoch": None,
        "num_sanity_val_steps": 0,
        "enable_checkpointing": True,
        **_QUIET,
    }
    trainer: L.Trainer = instantiate(settings, key="trainer")
    return trainer


def checkpoint_path(setting: str | None, run_dir: Path) -> Path | None:
    """`last` means the run directory's own; any other value is a file. Raises ConfigError when it is not there."""
    if setting is None:
        return None
    path = run_dir / "checkpoints" / "last.ckpt" if setting == "last" else Path(setting).expanduser()
    if not path.is_file():
        hint = f"; the checkpoints of run_dir={str(run_dir)!r} are meant" if setting == "last" else ""
        raise ConfigError(f"ckpt_path={setting!r}: there is no file {str(path)!r}{hint}")
    return path


def read_checkpoint(path: Path, *, setting: str = "ckpt_path") -> dict[str, Any]:
    """A checkpoint of ours, its tensors left on the disk. Raises ConfigError for any other file."""
    try:
        checkpoint = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except (RuntimeError, ValueError, EOFError, OSError, pickle.UnpicklingError) as error:
        raise ConfigError(f"{setting}={str(path)!r}: not a checkpoint that can be read") from error
    if not isinstance(checkpoint, dict) or "rhymerl" not in checkpoint:
        raise ConfigError(f"{setting}={str(path)!r}: not a checkpoint of rhymerl")
    return checkpoint


def check_same_run(
    checkpoint: Mapping[str, Any], module: RhymeModule, datamodule: PromptDataModule, path: Path | None
) -> None:
    """Raise ConfigError when a run cannot go on from the checkpoint: other weights, other data."""
    _check_weights(checkpoint["state_dict"], module.state_dict(), path)
    datamodule.load_state_dict(checkpoint[type(datamodule).__qualname__])


def _of_policy(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Those of a module without what has learned beside the policy."""
    return {name.removeprefix("model."): each for name, each in weights.items() if name.startswith("model.")}


def _check_weights(there: Mapping[str, torch.Tensor], here: Mapping[str, torch.Tensor], path: Path | None) -> None:
    saved, mine = ({name: tuple(each.shape) for name, each in weights.items()} for weights in (there, here))
    for name in [*mine, *saved]:
        if saved.get(name) != mine.get(name):
            raise ConfigError(
                f"ckpt_path={str(path)!r}: of another model than model.path or model.init, or with another adapter ({name}: "
                f"{saved.get(name, 'nothing')} there, {mine.get(name, 'nothing')} here)"
            )


class _RunConfig(L.Callback):
    """Keeps the config with the run, once nothing can be wrong with it any more, and in each checkpoint."""

    def __init__(self, config: DictConfig, run_dir: Path) -> None:
        self.config = config
        self.run_dir = run_dir

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.is_global_zero:
            save_config(self.config, self.run_dir)

    def state_dict(self) -> dict[str, Any]:
        return {"config": resolved(self.config)}


def _parts(config: DictConfig) -> tuple[PromptDataModule, RhymeModule]:
    """The data module and the module."""
    if not 0 <= config.seed < 2**32:
        raise ConfigError(f"seed={config.seed}: expected 0 to {2**32 - 1}")
    L.seed_everything(config.seed, verbose=False)
    datamodule, module = instantiate(config.data), instantiate(config.module)
    return datamodule, module


def _take_up_history(config: DictConfig, module: RhymeModule, datamodule: PromptDataModule) -> None:
    """An earlier run's answers, if any were named; a resumed run has its own."""
    path = config.history_file
    if path is not None and config.ckpt_path is not None:
        _note(f"history_file={path!r} is not read: the checkpoint has the run's own history")
    elif path is not None:
        _note(start_with(path, module, datamodule, required=config.history_file_required))


@rank_zero_only
def _show(metrics: Mapping[str, float]) -> None:
    table = Table(title="Evaluation", title_justify="left", show_header=False)
    for name, value in metrics.items():
        table.add_row(name, f"{value:.4g}")
    Console().print(table)


@rank_zero_only
def _note(words: str) -> None:
    Console().print(words, highlight=False, soft_wrap=True)


def _evaluate(trainer: L.Trainer, module: RhymeModule, datamodule: PromptDataModule) -> float:
    _note(f"Evaluating on {datamodule.num_validation_prompts:,} held-out prompts")
    metrics = trainer.validate(module, datamodule, verbose=False)[0]
    return float(metrics["eval/reward"])


def _speedup(
    config: DictConfig, trainer: Any, module: RhymeModule, datamodule: PromptDataModule, step_s: float
) -> float | None:
    """On the prompts that the next step would have; None without drafts, and for a backend that has no embedded engine."""
    if isinstance(module.drafter, NoDrafter) or not isinstance(module.backend, EmbeddedBackend):
        return None
    loader = datamodule.train_loader
    assert loader is not None
    parts = resolved(config)["module"]
    module.to(trainer.strategy.root_device)  # Lightning has taken it off
    measured = measure_speedup(
        module.policy,
        loader.peek(0).prompts,
        module.rollout,
        drafter=instantiate(parts["drafter"], key="drafter") or HistoryTreeDrafter(),
        budget=instantiate(parts["budget"], key="budget") or GoodputBudget(),
        history=module.history,
        like=module.backend,
        seed=module.seed,
        step_s=step_s,
        autocast=trainer.precision_plugin.forward_context,
    )
    _note(f"Drafts make rollouts {measured.ratio:.2f} times as fast; {measured.equal:.1%} of answers are the same")
    return round(measured.ratio, 3)


def _write_summary(result: Result, run_dir: Path) -> None:
    (run_dir / "summary.json").write_text(json.dumps(result, indent=2) + "\n")


def _say(result: Result, run_dir: Path) -> None:
    Console().print(summary_table(result))
    files = "summary.json, config.yaml, samples.jsonl, history.rhyme, checkpoints/"
    _note(f"Everything is in {run_dir}: {files}; curves: tensorboard --logdir {run_dir}")
