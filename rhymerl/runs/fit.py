"""Whole runs from a resolved config: what `rhymerl fit`, `resume` and `evaluate` do, and `rhymerl.fit` in a script."""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.utilities import rank_zero_only
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from rhymerl.callbacks import (
    EarlyWarnings,
    LiveProgress,
    RecordPasses,
    RecordRollouts,
    RecordSteps,
    WriteAnswers,
)
from rhymerl.config import instantiate, resolved, with_names
from rhymerl.config.output import Change
from rhymerl.data import PromptDataModule
from rhymerl.distributed.first import is_first_rank
from rhymerl.errors import ConfigError, RhymeError, require_at_least
from rhymerl.folders import RunFolder, cannot_write, check_folder, replacing
from rhymerl.progress import SILENT, ProgressBar, counted
from rhymerl.report import write_report
from rhymerl.report.page import REPORT
from rhymerl.report.printing import print_table
from rhymerl.report.steps import STEPS
from rhymerl.report.trace import PASSES, TRACE, write_trace
from rhymerl.runs.banner import banner, facts, how_to_go_on, noting_how_to_go_on
from rhymerl.runs.earlier import save_history, start_with
from rhymerl.runs.forecast import ForecastLine
from rhymerl.runs.plan import describe_dry_run
from rhymerl.runs.resume import ResumePoint, SavedPolicy, check_same_run, resume_point
from rhymerl.runs.summary import Summary, summary_table
from rhymerl.runs.trainer import RunConfig, build_trainer, note
from rhymerl.training.fsdp2 import FSDP2Strategy
from rhymerl.training.memory import check_memory, too_small
from rhymerl.training.module import RhymeModule
from rhymerl.training.trainer import check_backend, check_trainer, make_trainer, warn_of_cores, with_environment

Result = dict[str, Any]
Parts = tuple[PromptDataModule, RhymeModule]
_LEFT = (
    "report.html",
    TRACE,
    "summary.json",
    "config.yaml",
    "samples.jsonl",
    "rollouts.jsonl.gz",
    "history.rhyme",
    "checkpoints/",
    "csv/",
)  # to tell of


def fit(
    config: DictConfig,
    *,
    callbacks: Sequence[L.Callback] = (),
    progress: ProgressBar = SILENT,
    is_dry: bool = False,
    given: Parts | None = None,
) -> dict[str, Any]:
    """Train, evaluating before and after; rank 0 writes config, checkpoints, logs and summary.json to the run folder.

    A run that a callback stops early (`should_stop`) is saved but not evaluated; a finished run has nothing left to do.
    A dry run ends after all checks with an estimate (see `rhymerl.runs.plan.describe`), which it prints and returns; it
    writes nothing. `progress` is for evaluations. Data and module are those that are `given`, else built. Raises
    ConfigError and DataError for bad input before anything is computed, made or overwritten; other errors carry a note
    on how to resume.
    """
    run_dir = Path(config.run_dir)
    # Nobody else writes, and a default run_dir has the time in its name.
    folder = RunFolder(run_dir) if is_first_rank() else None
    with folder or nullcontext(), noting_how_to_go_on(run_dir), _full_disk(run_dir):
        return _fit(config, run_dir, folder, callbacks, progress, is_dry=is_dry, given=given)


def _fit(
    config: DictConfig,
    run_dir: Path,
    folder: RunFolder | None,
    callbacks: Sequence[L.Callback],
    progress: ProgressBar,
    *,
    is_dry: bool,
    given: Parts | None,
) -> dict[str, Any]:
    point = resume_point(config)
    if folder is not None and (point is None or not point.is_own):
        folder.refuse_second_run(may_start_over=config.ckpt_path == "auto")
    summary = Summary()
    trainer = _trainer_of(config, run_dir, point, [summary, *callbacks])
    datamodule, module = given or _parts(config, trainer)
    check_backend(trainer, module.backend)
    datamodule.begin_at(point.started if point is not None else None)
    datamodule.prepare_for(module)
    module.check(datamodule)
    setup, device_bytes = check_memory(module, trainer, datamodule)
    evaluates = datamodule.has_validation and trainer.limit_val_batches != 0
    if (monitor := config.checkpoint.get("monitor")) is not None and not evaluates:
        raise ConfigError(
            f"checkpoint.monitor={monitor!r}: there is nothing to evaluate on; set data.validation, or null"
        )
    if point is not None:
        changed = check_same_run(point, module, datamodule, config)
        done = _result_of_finished(point, run_dir, trainer, datamodule, evaluates=evaluates)
        if done is not None:
            return done
        _say_where(point, changed)
    _take_up_history(config, module, datamodule, is_resumed=point is not None)
    if is_dry:
        module.warn(datamodule)
        warn_of_cores(trainer)
        return describe_dry_run(setup, device_bytes)
    if folder is not None:
        folder.open(starts_over=point is None and config.ckpt_path == "auto")
    note(banner(module, datamodule, trainer, run_dir))
    if (words := too_small(setup, device_bytes)) is not None:
        note(words)
    module.progress = progress
    with module.one_engine():
        if point is None and evaluates:
            summary.eval_before = _evaluate(trainer, module, datamodule)
        trainer.fit(module, datamodule, ckpt_path=point.path if point is not None else None, weights_only=True)
        if evaluates and not trainer.should_stop:
            if module.evaluator.done_at != module.num_rollouts:
                _evaluate(trainer, module, datamodule)
            summary.eval_after = module.evaluator.metrics["eval/reward"]
    if not trainer.is_global_zero:
        return summary.result()
    result = summary.result()
    with replacing(run_dir / "summary.json") as part:
        part.write_text(json.dumps(result, indent=2) + "\n")
    save_history(run_dir / "history.rhyme", module, datamodule)
    if config.report:
        _report(run_dir)
    if _is_profiled(config):
        write_trace(run_dir)
    if (speedup := summary.speedup.speedup) is not None:
        note(str(speedup))
    _say(result, run_dir)
    if trainer.should_stop and (words := how_to_go_on(run_dir)):
        note(words)
    if (words := summary.nothing_learned) is not None:
        note(f"Nothing was learned: {words}", is_bad=True)
    for words in summary.failures.sentences():
        note(words, is_bad=True)
    return result


def _trainer_of(
    config: DictConfig, run_dir: Path, point: ResumePoint | None, callbacks: Sequence[L.Callback]
) -> L.Trainer:
    continues = point is not None and point.is_own
    is_profiled = _is_profiled(config)
    records_steps = config.get("report", True) or is_profiled
    warnings = EarlyWarnings()
    recorder: list[L.Callback] = [warnings]
    recorder += (
        [RecordSteps(run_dir / STEPS, warnings=warnings, facts=facts, continues=continues)] if records_steps else []
    )
    recorder += [RecordPasses(run_dir / PASSES, continues=continues)] if is_profiled else []
    recorder += [RecordRollouts(run_dir / "rollouts.jsonl.gz", continues=continues)] if config.record_rollouts else []
    progress = _progress(config)
    own = [RunConfig(config, run_dir, is_new=point is None or continues), *recorder, *progress, ForecastLine()]
    trainer = build_trainer(config, run_dir, [*own, *callbacks], point=point)
    check_trainer(trainer)
    return trainer


def _progress(config: DictConfig) -> list[L.Callback]:
    number = OmegaConf.select(config, "samples.print", default=0)
    require_at_least({"samples.print": (number, 0)}, error=ConfigError)
    if config.trainer.enable_progress_bar is not False:
        return [LiveProgress(num_answers=number)]
    if number:
        raise ConfigError(
            f"samples.print={number}: answers stand below the progress line, which trainer.enable_progress_bar=false turns off; "
            "leave one of the two out"
        )
    return []


def _is_profiled(config: DictConfig) -> bool:
    if config.profile not in (None, "trace"):
        raise ConfigError(f"profile={config.profile!r}: expected trace, or null for none")
    return config.profile is not None


def _result_of_finished(
    point: ResumePoint, run_dir: Path, trainer: L.Trainer, datamodule: PromptDataModule, *, evaluates: bool
) -> Result | None:
    """Return the result of a run with nothing left to do, else None; the data is at the checkpoint's place."""
    loader, path = datamodule.train_loader, run_dir / "summary.json"
    assert loader is not None
    epochs = trainer.max_epochs if trainer.max_epochs is not None else -1
    is_trained = 0 <= trainer.max_steps <= point.global_step or 0 <= epochs <= loader.epoch
    if not (is_trained and point.is_own and path.is_file()):
        return None
    result: Result = json.loads(path.read_text(encoding="utf-8"))
    if result["steps"] != point.num_rollouts or (evaluates and result["eval_reward_after"] is None):
        return None  # it was ended before its last evaluation was
    length = f"trainer.max_steps={trainer.max_steps}" if trainer.max_steps >= 0 else f"trainer.max_epochs={epochs}"
    note(
        f"The run in {run_dir} is finished: {point.num_rollouts} steps, {length}. A higher number there makes it go on."
    )
    return result


def evaluate(config: DictConfig, *, progress: ProgressBar = SILENT) -> dict[str, float]:
    """Return the validation metrics of the policy, or of a checkpoint (`ckpt_path`); needs no training data.

    The answers go to `evaluations/step=N.jsonl` in the run directory, or to `step=N-2.jsonl` and so on.
    """
    point, run_dir = resume_point(config), Path(config.run_dir)
    if point is None and config.ckpt_path is not None:
        raise ConfigError(f"ckpt_path={config.ckpt_path!r}: there is no checkpoint in run_dir={config.run_dir!r}")
    saved = SavedPolicy(point) if point is not None else None
    check_folder(run_dir)
    asked = resolved(config)["trainer"]
    answers = WriteAnswers(run_dir / "evaluations", step=point.num_rollouts if point is not None else 0)
    settings = {
        **asked,
        "callbacks": [*(asked.get("callbacks") or []), answers],
        "plugins": with_environment(asked.get("plugins")),
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": asked.get("enable_progress_bar") is True,
        "enable_model_summary": asked.get("enable_model_summary") is True,
    }
    trainer = make_trainer(settings)
    check_trainer(trainer)
    if trainer.limit_val_batches == 0:
        raise ConfigError("trainer.limit_val_batches=0: leaves nothing to evaluate; expected more, or null for all")
    if OmegaConf.is_missing(config.data, "train"):
        config.data.train = None
    datamodule, module = _parts(config)
    check_backend(trainer, module.backend)
    datamodule.begin_at(point.started if point is not None else None)
    datamodule.prepare_for(module, with_train=False)
    module.check(datamodule)
    if point is not None and saved is not None:
        saved.load_into(module.model)
        _say_where(point, [], doing="Evaluating")
    module.progress = progress
    _validate(trainer, module, datamodule)
    _show(module.evaluator.metrics)
    if (words := module.evaluation.why_nothing_passes(module.evaluator.metrics)) is not None:
        note(words)
    note(f"The answers are in {answers.path}")
    return module.evaluator.metrics


@contextmanager
def _full_disk(run_dir: Path) -> Iterator[None]:
    """Context in which a full disk is an error of one line, wherever it occurs."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise cannot_write(Path(error.filename or run_dir), error) from error


def _parts(config: DictConfig, trainer: L.Trainer | None = None) -> tuple[PromptDataModule, RhymeModule]:
    """Return the data module and the module; for a `trainer` that shards the weights come when it does."""
    if not 0 <= config.seed < 2**32:
        raise ConfigError(f"seed={config.seed}: expected 0 to {2**32 - 1}")
    L.seed_everything(config.seed, verbose=False)
    datamodule = instantiate(config.data)
    is_sharded = trainer is not None and isinstance(trainer.strategy, FSDP2Strategy)
    with trainer.init_module(empty_init=True) if trainer is not None and is_sharded else nullcontext():
        module = instantiate(config.module)
    module.save_hyperparameters(with_names(dict(module.hparams), config))
    return datamodule, module


def _take_up_history(
    config: DictConfig, module: RhymeModule, datamodule: PromptDataModule, *, is_resumed: bool
) -> None:
    """Take up an earlier run's answers, if any were named; a resumed run has its own."""
    path = config.history_file
    if path is not None and is_resumed:
        note(f"history_file={path!r} is not read: the checkpoint has the run's own history")
    elif path is not None:
        note(start_with(path, module, datamodule, required=config.history_file_required))


@rank_zero_only
def _show(metrics: Mapping[str, float]) -> None:
    print_table((), [(name, f"{value:.4g}") for name, value in metrics.items()], title="Evaluation")


def _say_where(point: ResumePoint, changed: Sequence[Change], *, doing: str = "Going on from") -> None:
    for words in point.notes:
        note(words)
    note(f"{doing} {point.path}, after step {point.num_rollouts}")
    if changed:
        note(f"Changed since then: {', '.join(map(str, changed))}")


def _evaluate(trainer: L.Trainer, module: RhymeModule, datamodule: PromptDataModule) -> float:
    note(f"Evaluating on {counted(datamodule.num_validation_prompts, 'held-out prompt')}")
    _validate(trainer, module, datamodule)
    return module.evaluator.metrics["eval/reward"]


def _validate(trainer: L.Trainer, module: RhymeModule, datamodule: PromptDataModule) -> None:
    settings = {name: module.evaluation.rollout(module.rollout, name) for name in datamodule.validation_names}
    answers = sum(len(datamodule.validation_loaders[name].prompts) * each.group_size for name, each in settings.items())
    with module.progress.during("answers of the evaluation", -(-answers // trainer.world_size)):
        trainer.validate(module, datamodule, verbose=False)


def _report(run_dir: Path) -> None:
    """Write the page about a run that has ended; where that fails, the run has not."""
    try:
        write_report([run_dir], run_dir / REPORT)
    except RhymeError as error:
        note(f"There is no report: {error}")


def _say(result: Result, run_dir: Path) -> None:
    Console().print(summary_table(result))
    found = [name for name in _LEFT if (run_dir / name).exists()]
    curves = f"; curves: tensorboard --logdir {run_dir}" if (run_dir / "tensorboard").is_dir() else ""
    note(f"Everything is in {run_dir}: {', '.join(found)}{curves}")
