"""Judges drafters on recorded rollouts, without a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from rhymerl.budgets.base import Budget
from rhymerl.budgets.fixed import FixedBudget
from rhymerl.config import construct, instantiate
from rhymerl.costs import CostCurve
from rhymerl.drafters.base import Drafter
from rhymerl.drafters.none import NoDrafter
from rhymerl.errors import ConfigError
from rhymerl.history.similarity import length_stability, similarity
from rhymerl.history.traces import TraceRecord, read_trace
from rhymerl.progress import SILENT, ProgressBar
from rhymerl.runs.replay import ASSUMED, Replay, ReplayTotals

ASSUMPTION = "a pass of n tokens takes 1 + n / 64"  # ASSUMED, in words
_WARM_UP = 16  # answers


def replay_trace(config: DictConfig, *, progress: ProgressBar = SILENT) -> dict[str, Any]:
    """Return what `rhymerl replay` prints of one drafter (see configs/replay.yaml)."""
    (result,) = judge(config, {"": config.drafter}, progress=progress)["drafters"].values()
    return dict(result)


def judge(config: DictConfig, drafters: Mapping[str, Any], *, progress: ProgressBar = SILENT) -> dict[str, Any]:
    """Return what `rhymerl replay` prints of several drafters, by name: all of them draft for the same answers.

    Raises DataError for a broken trace.
    """
    if config.trace is None:
        raise ConfigError("trace=null: name a file of recorded rollouts (.jsonl or .jsonl.gz)")
    if config.chart is not None:
        from rhymerl.report.pictures import check_picture

        check_picture("chart", Path(str(config.chart)))
    records = list(read_trace(config.trace))
    last = max(record.epoch for record in records)
    if config.from_epoch > last:
        raise ConfigError(f"from_epoch={config.from_epoch}: the trace ends with epoch {last}")
    costs = ASSUMED if config.costs is None else construct(CostCurve.read, {"costs": config.costs}, key="")
    sizes = {name: config[name] for name in ("max_running", "from_epoch", "answers")}
    settings = {"costs": costs, "progress": progress, "complaints": set(), **sizes}
    plain = construct(Replay, {"drafter": NoDrafter(), "budget": FixedBudget(0), **settings}, key="")
    num_replayed = sum(len(epoch.replayed) for epoch in plain.epochs_of(records))
    with progress.during("answers replayed", (1 + len(drafters)) * num_replayed):  # with drafts and without
        found = {name: _replayed(config, node, records, settings) for name, node in drafters.items()}
        cost = sum(plain.run(records).values(), ReplayTotals()).cost
    alike, lengths = similarity(records), length_stability(records)
    of_all = {
        "answers": num_replayed,
        "recorded_answers": sum(record.epoch >= config.from_epoch for record in records),
        "predicted_from": ASSUMPTION if config.costs is None else str(config.costs),
        "similarity": alike.overall,
        "length_same_group": lengths.same_group,
        "length_spearman": lengths.spearman,
    }
    return {"drafters": {name: {**_figures(each, cost), **of_all} for name, each in found.items()}, **of_all}


def _replayed(
    config: DictConfig, node: Any, records: Sequence[TraceRecord], settings: Mapping[str, Any]
) -> dict[int, ReplayTotals]:
    """Replay with a drafter, and with a few answers first: compiled functions take long the first time."""
    few = [replace(record, epoch=epoch) for epoch in (0, 1) for record in records[:_WARM_UP]]
    short = {"complaints": settings["complaints"]}
    for answers, these in ((few, short), (records, settings)):
        drafter = instantiate(node, key="drafter", kind=Drafter)
        try:
            budget = instantiate(config.budget, key="budget", kind=Budget)
            history = instantiate(config.history, key="history")
            parts = {"drafter": drafter, "budget": budget, "history": history}
            totals = construct(Replay, {**parts, **these}, key="").run(answers)
        finally:
            drafter.close()
    return totals


def _figures(by_epoch: Mapping[int, ReplayTotals], plain_cost: float) -> dict[str, Any]:
    totals = sum(by_epoch.values(), ReplayTotals())
    return {
        **totals.result(),
        "predicted_speedup": plain_cost / totals.cost,
        "epochs": {epoch: each.result() for epoch, each in by_epoch.items()},
    }
