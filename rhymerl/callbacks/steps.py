"""What each step did, on file for reports."""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import lightning as L

from rhymerl.callbacks.early_warnings import EarlyWarnings
from rhymerl.callbacks.samples import turn_facts
from rhymerl.report.steps import MAX_TEXTS, StepFile, answer_columns, source_runs
from rhymerl.rollout import Rollout
from rhymerl.types import IntArray, Output, Sample

_CONTEXT = 8  # tokens


class StepRecorder(L.Callback):
    """Has a file with a line a step, and its place there in the checkpoint, so that a resumed run continues it.

    Without `continues` the file begins with the run's first step.
    """

    def __init__(self, path: str | Path, *, continues: bool = True) -> None:
        self.continues = continues
        self._file = StepFile(path)

    def state_dict(self) -> dict[str, Any]:
        return {"num_bytes": self._file.num_bytes}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        if self.continues:
            self._file = StepFile(self._file.path, num_bytes=state_dict["num_bytes"])


class RecordSteps(StepRecorder):
    """Writes a run's records to `path`, in the format of report/steps.py.

    They are metrics, warnings, times of workers, an index of all answers and the texts of some. Texts are written for
    the same prompts in each epoch, so many that there are at most `MAX_TEXTS` answers over the run. Needs a RhymeModule
    and a PromptDataModule.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        warnings: EarlyWarnings | None = None,
        facts: Callable[[Any, Any], Mapping[str, str]] | None = None,
        continues: bool = True,
    ) -> None:
        super().__init__(path, continues=continues)
        self.warnings = warnings  # a callback that comes before this one
        self.facts = facts  # of trainer and module: what the header of the report says of the run
        self._start: dict[str, Any] = {}  # what the first record after a start says of it
        self._chosen: set[str] = set()  # keys of prompts whose answers are kept with their texts

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        """The length of the run is known now."""
        if not trainer.is_global_zero:
            return
        prompts = trainer.datamodule.train_loader.prompts  # type: ignore[attr-defined]
        per_step = trainer.datamodule.train_loader.prompts_per_step * pl_module.rollout.group_size  # type: ignore[attr-defined]
        num_steps = trainer.estimated_stepping_batches / pl_module.update.optimizer_steps
        share = min(MAX_TEXTS / (num_steps * per_step), 1.0) if math.isfinite(num_steps) else 0.0
        most = max(1, int(share * len(prompts)))
        self._chosen = set(heapq.nsmallest(most, {prompt.key for prompt in prompts}))
        if self.facts is not None:
            self._start = {"began_at": time.time(), "facts": dict(self.facts(trainer, pl_module))}

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Called before evaluations and checkpoints."""
        rollout: Rollout | None = pl_module.last_rollout
        if rollout is None or not trainer.is_global_zero:
            return
        loader = trainer.datamodule.train_loader  # type: ignore[attr-defined]
        self._file.append(
            {
                "step": pl_module.num_rollouts,
                "epoch": (loader.cursor - 1) // len(loader),  # it has moved on already
                "ended_at": time.time(),
                "metrics": pl_module.logged,
                "warnings": self.warnings.latest if self.warnings is not None else [],
                "holding": self.warnings.holding if self.warnings is not None else [],
                "workers_apart": pl_module.backend.workers_are_remote,
                "spans": [
                    [each.worker, each.activity, each.number, round(each.start_s, 4), round(each.end_s, 4)]
                    for each in rollout.spans
                ],
                "answers": answer_columns(rollout.samples),
                "texts": self._texts(rollout.samples, pl_module),
                **self._start,
            }
        )
        self._start = {}

    def on_validation_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        """The module knows its metrics by now."""
        if trainer.is_global_zero:
            self._file.append({"step": pl_module.num_rollouts, "evaluation": pl_module.evaluator.metrics})

    def _texts(self, samples: Sequence[Sample], pl_module: Any) -> list[dict[str, Any]]:
        chosen = [index for index, sample in enumerate(samples) if sample.prompt.key in self._chosen]
        advantages = pl_module.advantages(chosen)
        return [
            {
                "answer": index,
                "prompt": samples[index].prompt.text,
                "text": samples[index].text,
                **_parts(samples[index].completion.output.conversation(), pl_module.decode),
                "rewards": dict(samples[index].rewards),
                "advantage": advantage,
            }
            for index, advantage in zip(chosen, advantages, strict=True)
        ]


def _parts(output: Output, decode: Callable[[IntArray], str]) -> dict[str, Any]:
    """Return how many consecutive characters of the text come from each source, and where an episode's replies are."""
    runs = [] if output.sources is None else source_runs(output.sources)
    ends = list(accumulate(count for count, _ in runs))
    bounds = {place for turn in output.turns for place in (turn.start, turn.stop)}
    at = _characters(output.token_ids, bounds.union(ends), decode)
    shown = [
        [at[end] - at[begin], source] for (begin, end), (_, source) in zip(pairwise([0, *ends]), runs, strict=True)
    ]
    turns = [{"start": at[turn.start], "stop": at[turn.stop], **turn_facts(turn)} for turn in output.turns]
    return {
        "runs": None if output.sources is None else shown,
        **({"turns": turns, "finish_reason": output.finish_reason} if turns else {}),
    }


def _characters(token_ids: IntArray, places: Iterable[int], decode: Callable[[IntArray], str]) -> dict[int, int]:
    """Return how many characters of the text stand in front of each of these tokens."""
    found = {0: 0}
    begin = 0
    for end in sorted(places):
        # With what stands before: a character may be made of tokens of two parts, and a word begins with a space behind
        # others.
        start = max(0, begin - _CONTEXT)
        texts = [decode(token_ids[start:to]) for to in (begin, end)]
        found[end] = found[begin] + len(texts[1]) - len(texts[0])
        begin = end
    return found
