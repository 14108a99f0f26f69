"""A whole run of a module and data that a script or a notebook has made: `rhymerl.fit`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from pathlib import Path, PurePath
from typing import Any

import lightning as L
from omegaconf import MISSING, DictConfig

from rhymerl.config import compose, describe
from rhymerl.config.composition import parse
from rhymerl.data import PromptDataModule
from rhymerl.distributed.first import is_first_rank
from rhymerl.errors import ConfigError
from rhymerl.progress import SILENT, ShownProgressBar
from rhymerl.runs.fit import fit as fit_config
from rhymerl.runs.quiet import quiet
from rhymerl.training.hyperparameters import held
from rhymerl.training.module import RhymeModule

_OF_THE_RUN = (
    "checkpoint",
    "ckpt_path",
    "deterministic",
    "history_file",
    "history_file_required",
    "logger",
    "profile",
    "record_rollouts",
    "report",
    "samples",
    "trainer",
)


def fit(
    module: RhymeModule,
    data: PromptDataModule,
    *,
    run_dir: str | Path,
    settings: Sequence[str] = (),
    callbacks: Sequence[L.Callback] = (),
) -> dict[str, Any]:
    """Train `module` on `data` as `rhymerl fit` does, with all that it shows and leaves in `run_dir`.

    `settings` are those of the run, as on the command line: `["trainer.max_steps=20", "samples.print=3"]`. With
    `ckpt_path=auto` a run goes on. Returns what is in summary.json. Raises ConfigError and DataError for bad input.
    """
    config = _config_of(module, data, run_dir, settings)
    L.seed_everything(config.seed, verbose=False)
    progress = ShownProgressBar() if is_first_rank() else SILENT
    with quiet():
        return fit_config(config, callbacks=callbacks, progress=progress, given=(data, module))


def _config_of(module: RhymeModule, data: PromptDataModule, run_dir: str | Path, settings: Sequence[str]) -> DictConfig:
    """Return the config of such a run, in which an object that a config cannot name has a mark that says so."""
    config = compose("base", settings)
    for each in parse(settings):
        if each.key_or_group.partition(".")[0] not in _OF_THE_RUN:
            raise ConfigError(
                f"settings: {each.key_or_group} is the module's or the data's, which are given; expected {', '.join(_OF_THE_RUN)}"
            )
    config.run_dir = str(run_dir)
    for name, value in {**module.hparams, "workers": module.workers}.items():
        (config if name in config else config.module)[name] = value
    config.data = held(_without_rows(data), describe)
    return config


def _without_rows(data: PromptDataModule) -> PromptDataModule:
    """Return the like of `data`, with sources that are files only: a config has no rows."""
    found = copy(data)
    for name in ("train", "validation"):
        source = getattr(data, name)
        each = list(source.values()) if isinstance(source, Mapping) else [source]
        if not all(isinstance(path, str | PurePath | None) for path in each):
            setattr(found, name, MISSING)
    return found
