"""The step of a run at which an evaluation was best."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import lightning as L

from rhymerl.errors import ConfigError
from rhymerl.folders import replacing

Mode = Literal["max", "min"]


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
