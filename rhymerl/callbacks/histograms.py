"""How far drafts carried answers, as histograms in TensorBoard."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning as L
import numpy as np
from lightning.pytorch.loggers import TensorBoardLogger

from rhymerl.drafts import NOT_DRAFTED
from rhymerl.types import FloatArray, IndexArray, Sample

_RATES = np.linspace(0, 1, 21)
_END = np.array([NOT_DRAFTED], np.int8)  # an answer may end with accepted tokens


class AcceptanceHistograms(L.Callback):
    """Adds two histograms in each step that is logged and had drafts: of a pass and of an answer.

    `spec/accepted_in_a_row` has the draft tokens that were accepted between two that the policy sampled itself, for
    backends that tell where tokens came from; `spec/accept_rate_of_answer` has the share of each answer's draft tokens
    that were accepted.
    """

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        loggers = [each for each in trainer.loggers if isinstance(each, TensorBoardLogger)]
        rollout = getattr(pl_module, "last_rollout", None)
        every = trainer.log_every_n_steps  # type: ignore[attr-defined]
        is_due = bool(every) and pl_module.num_rollouts % every == 0
        if not loggers or rollout is None or not trainer.is_global_zero or not is_due:
            return
        rates, runs = accept_rates(rollout.samples), accepted_in_a_row(rollout.samples)
        for logger in loggers if len(rates) else ():
            add = logger.experiment.add_histogram
            add("spec/accept_rate_of_answer", rates, trainer.global_step, bins=_RATES)
            if len(runs):
                add("spec/accepted_in_a_row", runs, trainer.global_step, bins=np.arange(runs.max() + 2))


def accept_rates(samples: Sequence[Sample]) -> FloatArray:
    """Return the share of the draft tokens that were accepted, of each answer that had any."""
    counts = [(sample.completion.num_accepted, sample.completion.num_drafted) for sample in samples]
    return np.array([accepted / drafted for accepted, drafted in counts if drafted])


def accepted_in_a_row(samples: Sequence[Sample]) -> IndexArray:
    """Return how many accepted draft tokens stand before each token that the policy sampled itself, of all answers."""
    sources = [sample.completion.output.sources for sample in samples]
    known = [part for each in sources if each is not None for part in (each, _END)]
    if not known:
        return np.zeros(0, np.int64)
    ends = np.flatnonzero(np.concatenate(known) == NOT_DRAFTED)
    return np.diff(ends, prepend=-1) - 1
