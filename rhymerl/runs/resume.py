"""The point at which a run resumes: its checkpoint, whether it is the same run's, and changed settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from torch import nn

from rhymerl.config.output import Change, changes
from rhymerl.data import PromptDataModule
from rhymerl.errors import ConfigError
from rhymerl.training.checkpoint import newest_whole, policy_outline, policy_reader, read_checkpoint
from rhymerl.training.module import RhymeModule
from rhymerl.training.state import check_base

_NOT_OF_THE_RUN = ("run_dir", "ckpt_path")  # settings that say where this process finds it
# Settings that are in the weights, or in what is known of the data; `model.path` may be another place of the same
# weights.
_FIXED = ("model", "adapter", "critic.shared")
_MAY_MOVE = ("model.path",)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumePoint:
    """A whole checkpoint of ours to go on from."""

    path: Path
    is_own: bool  # of the run directory that goes on, whose files it continues
    num_rollouts: int  # rollout steps that are in its weights
    global_step: int  # optimizer steps
    logged: Mapping[str, float]  # what the curves have of its last step
    started: str | None  # when its run was, if prompts tell it: the data module's
    notes: tuple[str, ...]  # what to tell about the choice

    def read(self) -> dict[str, Any]:
        """Read all of it, with the tensors left on the disk: as long as it is held, a removed file takes room there."""
        return read_checkpoint(self.path, is_whole=True)


class SavedPolicy:
    """The policy of a checkpoint, which a run that goes on may remove from now on."""

    def __init__(self, point: ResumePoint) -> None:
        checkpoint = point.read()
        self._where = f"ckpt_path={str(point.path)!r}"
        self._outline = policy_outline(checkpoint)
        self._read = policy_reader(point.path, checkpoint)

    def load_into(self, model: nn.Module) -> None:
        """Copy tensors one by one into a model, without a second copy of it. Raises ConfigError for another model."""
        weights = model.state_dict()
        check_weights(self._outline, weights, self._where)
        for name, weight in weights.items():
            weight.copy_(self._read([name])[name])


def resume_point(config: DictConfig) -> ResumePoint | None:
    """Return the checkpoint that `ckpt_path` names; None is the start.

    It is a file, or `last`, `best` or `auto` (the newest whole one) of `run_dir`. Raises ConfigError when what it names
    is not there, or not whole.
    """
    run_dir = Path(config.run_dir)
    is_auto = config.ckpt_path == "auto"
    path, notes = _newest(run_dir) if is_auto else (checkpoint_path(config.ckpt_path, run_dir), ())
    if path is None:
        return None
    checkpoint = read_checkpoint(path, is_whole=is_auto)
    return ResumePoint(
        path=path,
        is_own=run_dir.resolve() in path.resolve().parents,
        num_rollouts=int(checkpoint["rhymerl"]["num_rollouts"]),
        global_step=int(checkpoint["global_step"]),
        logged=checkpoint["rhymerl"]["logged"],
        started=next(
            (part["started"] for part in checkpoint.values() if isinstance(part, dict) and "started" in part), None
        ),
        notes=notes,
    )


def _newest(run_dir: Path) -> tuple[Path | None, tuple[str, ...]]:
    """Return the newest whole checkpoint, and what is wrong with those that are newer."""
    path, damaged = newest_whole(run_dir / "checkpoints")
    notes = tuple(f"{each} is damaged: {reason}" for each, reason in damaged.items())
    if path is None and notes:
        raise ConfigError(f"ckpt_path='auto': no checkpoint of run_dir={str(run_dir)!r} is whole ({'; '.join(notes)})")
    return path, notes


def checkpoint_path(setting: str | None, run_dir: Path) -> Path | None:
    """Return the run directory's own for `last` and `best`, else the file. Raises ConfigError if there is none."""
    if setting is None:
        return None
    is_own = setting in ("last", "best")
    path = run_dir / "checkpoints" / f"{setting}.ckpt" if is_own else Path(setting).expanduser()
    if not path.is_file():
        hint = f"; the checkpoints of run_dir={str(run_dir)!r} are meant" if is_own else ""
        raise ConfigError(f"ckpt_path={setting!r}: there is no file {str(path)!r}{hint}")
    return path


def check_same_run(
    point: ResumePoint, module: RhymeModule, datamodule: PromptDataModule, config: DictConfig
) -> list[Change]:
    """Return the settings changed since the checkpoint, all of which hold from now on.

    The data is at the checkpoint's place. Raises ConfigError when a run cannot go on like that: other weights, other
    data.
    """
    where, checkpoint = f"ckpt_path={str(point.path)!r}", point.read()
    check_weights(checkpoint["state_dict"], module.state_dict(), where)
    datamodule.load_state_dict(checkpoint[type(datamodule).__qualname__])
    check_base(module, checkpoint["rhymerl"], where)
    saved = checkpoint["callbacks"].get("_RunConfig", {}).get("config")
    found = [each for each in changes(saved, config) if each.key not in _NOT_OF_THE_RUN] if saved is not None else []
    for change in found:
        is_fixed = any(f"{change.key}.".startswith(f"{each}.") for each in _FIXED)
        if is_fixed and change.key not in _MAY_MOVE:
            raise ConfigError(
                f"{change.key}={change.now!r}: the checkpoint was written with {change.before!r}; a resumed run cannot change it"
            )
    return found


def check_weights(there: Mapping[str, torch.Tensor], here: Mapping[str, torch.Tensor], where: str) -> None:
    """Raise ConfigError unless both have the same tensors, by names and shapes."""
    saved, mine = ({name: tuple(each.shape) for name, each in weights.items()} for weights in (there, here))
    for name in [*mine, *saved]:
        if saved.get(name) != mine.get(name):
            raise ConfigError(
                f"{where}: of another model than model.path or model.init, or with another adapter ({name}: "
                f"{saved.get(name, 'nothing')} there, {mine.get(name, 'nothing')} here)"
            )
