"""The forecast after the first epoch: how much answers repeat one another, and what drafts should gain from that."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import lightning as L

from rhymerl.budgets.fixed import FixedBudget
from rhymerl.drafters.history_tree import HistoryTreeDrafter
from rhymerl.history.similarity import similarity
from rhymerl.history.traces import TraceRecord, record_of
from rhymerl.report.printing import say
from rhymerl.runs.replay import Replay
from rhymerl.training.module import RhymeModule

_NODES = 8
_MOST_ANSWERS = 256  # of which half are replayed: some tens of milliseconds
_LEAST_ANSWERS = 16
_LITTLE = 1.25  # tokens a pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What half of each prompt's answers says about the other half, as one epoch says about the next."""

    similarity: float  # share of tokens that repeat the other half's (history/similarity.py)
    tokens_per_pass: float  # with drafts of 8 nodes from the other half

    def __str__(self) -> str:
        found = f"Answers to a prompt repeat {self.similarity:.0%} of each other"
        if self.tokens_per_pass >= _LITTLE:
            return f"{found}: drafts should reach an acceptance length of {self.tokens_per_pass:.1f}"
        return f"{found}: drafts will hardly pay yet"


def forecast(records: Iterable[TraceRecord]) -> Forecast | None:
    """Return the forecast for later epochs from one epoch's answers; None if too few prompts have two answers."""
    groups: dict[str, list[TraceRecord]] = {}
    for each in records:
        groups.setdefault(each.prompt_id, []).append(each)
    halves = [half for group in groups.values() if len(group) > 1 for half in _halves(group)]
    if len(halves) < _LEAST_ANSWERS:
        return None
    drafter = HistoryTreeDrafter(deterministic=True)
    try:
        totals = Replay(drafter, FixedBudget(_NODES), from_epoch=1).run(halves)
    finally:
        drafter.close()
    return Forecast(similarity=similarity(halves).overall, tokens_per_pass=totals[1].result()["tokens_per_pass"])


def _halves(group: Sequence[TraceRecord]) -> list[TraceRecord]:
    """Return the answers to a prompt in two halves, as answers of two epochs."""
    return [replace(each, epoch=int(index >= len(group) // 2)) for index, each in enumerate(group)]


class ForecastLine(L.Callback):
    """Prints the forecast when the first pass ends and another follows, where drafts come from history. Rank 0 only."""

    def __init__(self) -> None:
        self._records: list[TraceRecord] = []

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert isinstance(pl_module, RhymeModule)
        is_wanted = trainer.current_epoch == 0 and len(self._records) < _MOST_ANSWERS
        has_history = isinstance(pl_module.drafter, HistoryTreeDrafter)
        if not is_wanted or not has_history or not trainer.is_global_zero or pl_module.last_rollout is None:
            return
        samples = pl_module.last_rollout.samples
        self._records += [record_of(each, 0) for each in samples if each.completion.finish_reason != "withdrawn"]

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._records and trainer.current_epoch == 1:
            found = forecast(self._records)
            if found is not None:
                say(str(found))
        self._records = []
