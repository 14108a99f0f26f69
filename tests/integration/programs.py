"""The command line in processes of its own, forked from one that has imported everything; and parts that kill them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import lightning as L

from rhymerl.algos import GRPO
from rhymerl.callbacks import AtomicCheckpointIO
from rhymerl.drafters import HistoryTreeDrafter
from rhymerl.tasks import Task

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["pytest", "rhymerl.runs.fit", "rhymerl.runs.warmstart", "tests.integration.programs"])


def start(words: Sequence[str], output: Path) -> ForkServerProcess:
    """`rhymerl WORDS` with stdout and stderr in one file; the exit code is the process's."""
    return run(_main, list(words), str(output))


def run(function: Callable[..., None], *arguments: Any) -> ForkServerProcess:
    """A function in a process of its own."""
    process = CONTEXT.Process(target=function, args=arguments)
    process.start()
    return process


def _main(words: list[str], output: str) -> None:
    import torch

    from rhymerl.cli import main

    torch.set_num_threads(1)
    for name in ("COLUMNS", "LINES"):  # readline, which pytest imports, exports the size of another terminal
        os.environ.pop(name, None)
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOCTTY)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.exit(main(words))


def die() -> None:
    """No clean-up of any kind."""
    os.kill(os.getpid(), signal.SIGKILL)


class DieInUpdate(GRPO):
    """Sends the process a signal in the n-th backward."""

    def __init__(self, *, call: int, signal: int = signal.SIGKILL) -> None:
        super().__init__()
        self.call = call
        self.signal = int(signal)
        self._calls = 0

    def loss(self, *args: Any, **kwargs: Any) -> Any:
        self._calls += 1
        if self._calls == self.call:
            os.kill(os.getpid(), self.signal)
        return super().loss(*args, **kwargs)


class DieInRollout(HistoryTreeDrafter):
    """Drafts as the whole run does, and kills the process when the n-th answer is complete."""

    def __init__(self, *, call: int) -> None:
        super().__init__(deterministic=True)
        self.call = call
        self._calls = 0

    def finish(self, completion: Any) -> None:
        super().finish(completion)
        self._calls += 1
        if self._calls == self.call:
            die()


class KeepMetrics(L.Callback):
    """The `kl` of every step, kept in the checkpoint."""

    def __init__(self) -> None:
        self.kl: list[float] = []

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        self.kl.append(float(trainer.callback_metrics["kl"]))

    def state_dict(self) -> dict[str, Any]:
        return {"kl": self.kl}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.kl = state_dict["kl"]


class DieInSave:
    """Kills the process that pickles it."""

    def __reduce__(self) -> Any:
        die()


def save_and_die(path: str) -> None:
    """A checkpoint that is never finished."""
    AtomicCheckpointIO().save_checkpoint({"weights": list(range(100_000)), "last": DieInSave()}, path)


class Silent(Task):
    """A task without demonstrations."""

    reward = "tests.integration.rewards.digits"

    def problem(self, random_source: Any) -> dict[str, str]:
        return {"prompt": str(random_source.random())}
