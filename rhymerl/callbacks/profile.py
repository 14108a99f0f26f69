"""Further records of a profiled run: each engine pass in the ranks, and when rewards and replies arrived."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import lightning as L

from rhymerl.backends.embedded import EmbeddedBackend
from rhymerl.callbacks.steps import StepRecorder
from rhymerl.engine.totals import PassRecord


class RecordPasses(StepRecorder):
    """Writes a line a step to `path`: passes and rewards of all ranks, and when episodes waited for environments.

    Engines in processes of their own do not report passes. Runs on every rank. Needs a RhymeModule.
    """

    def __init__(self, path: str | Path, *, continues: bool = True) -> None:
        super().__init__(path, continues=continues)
        self._passes: list[PassRecord] = []
        self._rewards: list[tuple[str, float]] = []  # by name, in time.monotonic()

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Observe the engine, which exists by now; discard records since the last step, an evaluation's."""
        self._passes.clear()
        self._rewards.clear()
        if isinstance(pl_module.backend, EmbeddedBackend):
            observers = pl_module.backend.engine.observers
            if self._passes.append not in observers:
                observers.append(self._passes.append)
        pl_module._scorer.log = self._rewards

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        to_unix_s = time.time() - time.monotonic()
        mine = {
            "passes": [
                [round(each.end_s - each.seconds, 5), round(each.seconds, 5), each.rows, each.tokens, each.nodes]
                for each in self._passes
            ],
            "rewards": [[name, round(at_s + to_unix_s, 5)] for name, at_s in self._rewards],
        }
        of_ranks = pl_module._ranks.gather(mine)
        if trainer.is_global_zero:
            turns = [turn for each in pl_module.last_rollout.samples for turn in each.completion.output.turns]
            waits = [
                [round(turn.replied_at - turn.waited_s, 5), round(turn.replied_at, 5)]
                for turn in turns
                if turn.waited_s
            ]
            self._file.append({"step": pl_module.num_rollouts, "ranks": of_ranks, "waits": waits})
