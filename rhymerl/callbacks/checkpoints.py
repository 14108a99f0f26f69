"""Checkpoints that a kill at any instant leaves whole."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Literal

import lightning as L
import torch
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.trainer.states import TrainerFn

from rhymerl.errors import ConfigError, require_at_least
from rhymerl.folders import replacing
from rhymerl.training import shards
from rhymerl.training.checkpoint import damage, seal, step_of, unreadable

Mode = Literal["max", "min"]


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes beside the target and renames, so the old file stays whole until the new one is on the disk.

    A checkpoint that ranks have written in parts is read whole. Lightning's own goes through the directory for
    temporary files, from where a move may be a copy. Raises RunError, naming the file, when it cannot be written.
    """

    def __init__(self, *, checks: bool = True) -> None:
        super().__init__()
        self.checks = checks

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        with replacing(Path(path)) as part, part.open("w+b") as file:
            _save(checkpoint, file)
            seal(file)
            file.flush()
            os.fsync(file.fileno())

    def load_checkpoint(
        self,
        path: str | Path,
        map_location: Callable[..., Any] | None = lambda storage, loc: storage,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Raises ConfigError for a file that is damaged, unless somebody has looked at it already (`checks` is off)."""
        if self.checks and Path(path).exists() and (reason := damage(Path(path))):  # else it is no local file
            raise unreadable(f"ckpt_path={str(path)!r}", reason)
        checkpoint = super().load_checkpoint(path, map_location=map_location, weights_only=weights_only)
        if shards.KEY not in checkpoint:
            return checkpoint
        folder = shards.folder_of(checkpoint, Path(path), f"ckpt_path={str(path)!r}")
        return shards.read_whole(checkpoint, folder)


def _save(checkpoint: dict[str, Any], file: BinaryIO) -> None:
    """torch hides an error of the file's behind its own."""
    try:
        torch.save(checkpoint, file)
    except RuntimeError as error:
        hidden: BaseException | None = error
        while hidden is not None and not isinstance(hidden, OSError):
            hidden = hidden.__context__
        raise (hidden or error) from None


class Checkpoints(Checkpoint):
    """`step=N.ckpt` after every `every_n_steps` rollout steps and after the last; `last.ckpt` is a link to the newest.

    The `keep` newest stay. With `monitor`, a metric of evaluations such as `eval/reward`, the step with its highest
    (`mode` max) or lowest (min) value gets a checkpoint, which stays too: `best.ckpt` is a link to it, and `best.json`
    has the value. Lightning's ModelCheckpoint counts optimizer steps, so several mini-batches a step would step over
    its multiples. Needs a module that counts `num_rollouts`.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        every_n_steps: int,
        keep: int,
        monitor: str | None = None,
        mode: Mode = "max",
    ) -> None:
        require_at_least({"every_n_steps": (every_n_steps, 1), "keep": (keep, 1)})
        self.directory = Path(directory)
        self.every_n_steps = every_n_steps
        self.keep = keep
        self.monitor = monitor
        self.mode = mode
        self._saved: int | None = None
        self._best = BestStep(self.directory, monitor=monitor, mode=mode) if monitor is not None else None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._best is not None:
            self._best.restore(trainer, _num_steps(pl_module))

    def on_validation_end(self, trainer: Any, pl_module: L.LightningModule) -> None:
        """Raises ConfigError for a metric that evaluations do not have, before the first step."""
        if self._best is None:
            return
        metrics: Any = pl_module.evaluator.metrics  # type: ignore[union-attr]
        step, is_better = _num_steps(pl_module), self._best.compare(metrics, _num_steps(pl_module))
        path = self._path(step)
        if not is_better or not step or trainer.fast_dev_run:
            return
        if trainer.state.fn == TrainerFn.FITTING and self._saved != step:
            self._save(trainer, step)
        if trainer.is_global_zero and path.exists():
            self._best.link(path)
            self._remove_old()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # A run that ends within an epoch is saved here, not at the end: there the epoch would count as done.
        ends = trainer.should_stop or 0 <= trainer.max_steps <= trainer.global_step
        if ends or _num_steps(pl_module) % self.every_n_steps == 0:
            self._save(trainer, _num_steps(pl_module))

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._saved != _num_steps(pl_module):
            self._save(trainer, _num_steps(pl_module))

    def _save(self, trainer: Any, step: int) -> None:
        if trainer.fast_dev_run:
            return
        for logger in trainer.loggers:  # what the checkpoint knows of is on the disk before it
            logger.save()
        path = self._path(step)
        trainer.save_checkpoint(path, weights_only=False)  # said, or Lightning tells the user that it was not
        self._saved = step
        if trainer.is_global_zero:
            link_to(path, self.directory / "last.ckpt")
            self._remove_old()

    def _path(self, step: int) -> Path:
        return self.directory / f"step={step}.ckpt"

    def _remove_old(self) -> None:
        """Later ones are left alone: they are from before the run was taken back to an earlier checkpoint."""
        steps = {step: path for path in self.directory.glob("step=*.ckpt") if (step := step_of(path)) is not None}
        best = self._best.step if self._best is not None else None
        for step in sorted(step for step in steps if step <= (self._saved or 0))[: -self.keep]:
            if step != best:
                steps[step].unlink()
        shards.remove_orphans(self.directory)


def _num_steps(module: L.LightningModule) -> int:
    return int(module.num_rollouts)  # type: ignore[arg-type]


class BestStep:
    """Knows the best value of a metric of evaluations so far, and keeps it in `best.json` beside the checkpoints.

    A file, and no state of a checkpoint: the last evaluation of a run comes after its last checkpoint.
    """

    def __init__(self, directory: Path, *, monitor: str, mode: Mode) -> None:
        if not monitor.startswith("eval/"):
            raise ValueError(f"monitor={monitor!r}: expected a metric of evaluations such as eval/reward, or null")
        if mode not in ("max", "min"):
            raise ValueError(f"mode={mode!r}: expected max or min")
        self.directory = directory
        self.monitor = monitor
        self.mode = mode
        self.step: int | None = None
        self.value = math.nan

    def restore(self, trainer: L.Trainer, num_steps: int) -> None:
        """Go on with what the run knew after `num_steps`; called on all ranks, of which the first reads."""
        found = self._read(num_steps) if trainer.is_global_zero else None
        self.step, self.value = trainer.strategy.broadcast(found) or (None, math.nan)

    def _read(self, num_steps: int) -> tuple[int, float] | None:
        path = self.directory / "best.json"
        if not path.is_file():
            return None
        found = json.loads(path.read_text(encoding="utf-8"))
        is_known = found["monitor"] == self.monitor and found["mode"] == self.mode and found["step"] <= num_steps
        return (found["step"], found["value"]) if is_known and (self.directory / "best.ckpt").exists() else None

    def compare(self, metrics: Mapping[str, float], step: int) -> bool:
        """Return whether this is the best evaluation so far of a policy that has been trained, and remember it then.

        Raises ConfigError for a metric that there is not.
        """
        if self.monitor not in metrics:
            raise ConfigError(
                f"checkpoint.monitor={self.monitor!r}: no metric of the evaluation; it has {', '.join(sorted(metrics))}"
            )
        value = float(metrics[self.monitor])
        is_first = math.isnan(self.value) and not math.isnan(value)
        is_better = is_first or (value > self.value if self.mode == "max" else value < self.value)
        if is_better and step:
            self.step, self.value = step, value
        return is_better and step > 0

    def link(self, path: Path) -> None:
        """Point `best.ckpt` at the step's checkpoint."""
        record: dict[str, Any] = {"monitor": self.monitor, "mode": self.mode, "value": self.value, "step": self.step}
        with replacing(self.directory / "best.json") as part:
            part.write_text(json.dumps(record) + "\n", encoding="utf-8")
        link_to(path, self.directory / "best.ckpt")


def link_to(path: Path, link: Path) -> None:
    """Make `link`, or let it point at `path` in the same directory from now on."""
    with replacing(link) as part:
        part.unlink(missing_ok=True)
        part.symlink_to(path.name)
