"""A live line of the training run: step, reward, length, speed, memory, time left; with answers below, if asked."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import lightning as L
from rich import get_console
from rich.console import Group
from rich.live import Live
from rich.text import Text

from rhymerl.callbacks.samples import answer_lines
from rhymerl.progress import about

_KNOWN_AFTER = 3  # steps
_LINE_S = 60.0
_BAR = 24  # columns
_DROPPED = ("bar", "elapsed", "length", "speed", "memory")  # in this order, where a terminal is too narrow


class LiveProgress(L.Callback):
    """A bar on a terminal, else plain lines. Rank 0 only.

    A line comes after the first and third step, every `lines_every` steps, every minute, and at the end. Below it are
    `num_answers` answers of the latest step with their rewards, each in a line.
    """

    def __init__(self, *, lines_every: int = 10, num_answers: int = 0) -> None:
        self.lines_every = lines_every
        self.num_answers = num_answers
        self._console = get_console()  # as others print by it, too, they do so above the line
        self._live: Live | None = None
        self._parts: dict[str, str] = {}
        self._answers: list[str] = []
        self._counted = (0, 0.0)  # done, and of how many
        self._num_batches = 0  # since this start
        self._began_at = self._first_at = self._latest_at = self._line_at = 0.0  # the ends of batches, and a line
        self._first_done = 0
        self._line_done = -1

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._num_batches, self._parts, self._answers = 0, {}, []
        self._began_at = time.monotonic()
        if not trainer.is_global_zero or not self._console.is_terminal:
            return
        self._counted = (_done(trainer), trainer.estimated_stepping_batches)
        self._live = Live(console=self._console, get_renderable=self._shown)
        self._live.start()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not trainer.is_global_zero:
            return
        self._count(trainer)
        self._parts = parts_of(trainer.callback_metrics)
        is_due = self._num_batches in (1, _KNOWN_AFTER) or _num_batches(trainer) % self.lines_every == 0
        if self._live is not None or is_due or self._latest_at - self._line_at > _LINE_S:
            self._show(pl_module)

    def _count(self, trainer: L.Trainer) -> None:
        self._num_batches += 1
        self._latest_at = time.monotonic()
        self._counted = (_done(trainer), trainer.estimated_stepping_batches)
        if self._num_batches == 1:
            self._first_at, self._first_done = self._latest_at, _done(trainer)

    def _show(self, pl_module: L.LightningModule) -> None:
        """Have the answers ready for the terminal, or print a line and the answers."""
        rollout = getattr(pl_module, "last_rollout", None)
        samples = rollout.samples if rollout is not None and self.num_answers else ()
        self._answers = answer_lines(samples, self.num_answers, columns=self._console.width)
        if self._live is not None:
            return
        self._line_at, self._line_done = self._latest_at, self._counted[0]
        parts = {name: words for name, words in self._parts.items() if name != "memory"} | self._left("about ")
        for line in ("  ".join([f"step {self._counted[0]}", *parts.values()]), *self._answers):
            self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def _left(self, begin: str = "") -> dict[str, str]:
        """Return the time left, once it is known: the first step compiles."""
        done, total = self._counted
        if self._num_batches < _KNOWN_AFTER or not done < total < float("inf"):
            return {}
        a_step = (self._latest_at - self._first_at) / (done - self._first_done)
        since = time.monotonic() - self._latest_at
        return {"left": f"{begin}{about(a_step * (total - done) - since).removeprefix('about ')} left"}

    def _shown(self) -> Group:
        """Return the line and the answers, as wide as the terminal is now."""
        done, total = self._counted
        is_known = total < float("inf")
        filled = round(_BAR * min(done / total, 1)) if is_known and total else 0
        parts = {
            "step": f"step {done}/{total:.0f}" if is_known else f"step {done}",
            **({"bar": "━" * filled + "─" * (_BAR - filled)} if is_known else {}),
            **self._parts,
            "elapsed": str(timedelta(seconds=int(time.monotonic() - self._began_at))),
            **self._left(),
        }
        line = Text(fitted(parts, self._console.width), no_wrap=True)
        line.highlight_regex("━+", "green")
        line.highlight_regex("─+", "dim")
        return Group(line, *(Text(each, no_wrap=True, overflow="ellipsis") for each in self._answers))

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._parts = {"status": "evaluating"}

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Print a line for the last step in any case."""
        is_told = self._live is not None or not trainer.is_global_zero or not self._num_batches
        if not is_told and self._line_done != _done(trainer):
            self._parts = parts_of(trainer.callback_metrics)
            self._show(pl_module)
        self._stop()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._stop()

    def _stop(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


def _done(trainer: L.Trainer) -> int:
    """Return what the total counts: optimizer steps if the run ends by max_steps, else batches."""
    return trainer.global_step if trainer.max_steps >= 0 else _num_batches(trainer)


def _num_batches(trainer: L.Trainer) -> int:
    return trainer.fit_loop.epoch_loop.total_batch_idx + 1


def parts_of(metrics: Any) -> dict[str, str]:
    """Return `reward 0.412`, `length 43.1`, `5,210 tok/s`, `1.2 GB` from those metrics that were logged."""
    parts = {
        **({"loss": ("loss", "loss {:.4f}")} if "reward" not in metrics else {"reward": ("reward", "reward {:.3f}")}),
        "length": ("completions/mean_length", "length {:.1f}"),
        "speed": ("rollout/tokens_per_s", "{:,.0f} tok/s"),
        "memory": ("perf/peak_memory_gb", "{:.1f} GB"),
    }
    return {part: form.format(float(metrics[name])) for part, (name, form) in parts.items() if name in metrics}


def fitted(parts: Mapping[str, str], columns: int) -> str:
    """Return the parts as a line of so many columns, without those that there is no room for."""
    left = dict(parts)
    for name in _DROPPED:
        if len("  ".join(left.values())) > columns:
            left.pop(name, None)
    return "  ".join(left.values())
