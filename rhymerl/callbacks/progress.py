"""A live line of the training run: step, reward, length, speed, time left."""

from __future__ import annotations

import time
from typing import Any

import lightning as L
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from rhymerl.progress import about

_KNOWN_AFTER = 3  # steps
_LINE_S = 60.0


class LiveProgress(L.Callback):
    """A bar on a terminal, else plain lines. Rank 0 only.

    A line comes after the first and third step, every `lines_every` steps, every minute, and at the end.
    """

    def __init__(self, *, lines_every: int = 10) -> None:
        self.lines_every = lines_every
        self._console = Console()
        self._progress: Progress | None = None
        self._task: Any = None
        self._num_batches = 0  # since this start
        self._first_at = self._line_at = 0.0  # the end of the first one, and the latest line
        self._first_done = 0
        self._line_done = -1

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._num_batches = 0
        if not trainer.is_global_zero or not self._console.is_terminal:
            return
        total = trainer.estimated_stepping_batches
        self._progress = Progress(
            TextColumn("[bold]step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[status]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self._console,
        )
        self._task = self._progress.add_task(
            "", total=None if total == float("inf") else int(total), completed=_done(trainer), status=""
        )
        self._progress.start()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not trainer.is_global_zero:
            return
        status = status_line(trainer.callback_metrics)
        if self._progress is not None:
            self._progress.update(self._task, completed=_done(trainer), status=status)
        else:
            self._print(trainer, status)

    def _print(self, trainer: L.Trainer, status: str) -> None:
        """Print a line when one is due; the time left is unknown at first, because the first step compiles."""
        now = time.monotonic()
        self._num_batches += 1
        if self._num_batches == 1:
            self._first_at, self._first_done = now, _done(trainer)
        is_due = self._num_batches in (1, _KNOWN_AFTER) or _num_batches(trainer) % self.lines_every == 0
        if is_due or now - self._line_at > _LINE_S:
            self._line_at, self._line_done = now, _done(trainer)
            left = f"  {about(self._left_s(trainer, now))} left" if self._is_known(trainer) else ""
            self._say(trainer, f"{status}{left}")

    def _say(self, trainer: L.Trainer, words: str) -> None:
        self._console.print(f"step {_done(trainer)}  {words}", highlight=False)

    def _is_known(self, trainer: L.Trainer) -> bool:
        return self._num_batches >= _KNOWN_AFTER and _done(trainer) < trainer.estimated_stepping_batches < float("inf")

    def _left_s(self, trainer: L.Trainer, now: float) -> float:
        done = _done(trainer)
        return (now - self._first_at) * (trainer.estimated_stepping_batches - done) / (done - self._first_done)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._progress is not None:
            self._progress.update(self._task, status="evaluating")

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Print a line for the last step in any case."""
        is_told = self._progress is not None or not trainer.is_global_zero or not self._num_batches
        if not is_told and self._line_done != _done(trainer):
            self._say(trainer, status_line(trainer.callback_metrics))
        self._stop()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._stop()

    def _stop(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


def _done(trainer: L.Trainer) -> int:
    """Return what the total counts: optimizer steps if the run ends by max_steps, else batches."""
    return trainer.global_step if trainer.max_steps >= 0 else _num_batches(trainer)


def _num_batches(trainer: L.Trainer) -> int:
    return trainer.fit_loop.epoch_loop.total_batch_idx + 1


def status_line(metrics: Any) -> str:
    """Return `reward 0.412  length 43.1  5,210 tok/s` from those metrics that were logged."""
    parts = [
        ("loss", "loss {:.4f}") if "reward" not in metrics else ("reward", "reward {:.3f}"),
        ("completions/mean_length", "length {:.1f}"),
        ("rollout/tokens_per_s", "{:,.0f} tok/s"),
    ]
    return "  ".join(form.format(float(metrics[name])) for name, form in parts if name in metrics)
