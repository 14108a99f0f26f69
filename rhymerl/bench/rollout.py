"""Rollout speed of each drafter against none: same requests and seeds, in turn, by number of running requests."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np
from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table

from rhymerl.bench.base import SpeedRatio, environment
from rhymerl.bench.costs import CostTable, measure_costs
from rhymerl.bench.policy import PolicyBench
from rhymerl.budgets import Budget, FixedBudget
from rhymerl.config import instantiate, recorded
from rhymerl.drafters.base import Drafter
from rhymerl.drafters.ngram import NGramDrafter
from rhymerl.drafters.none import NoDrafter
from rhymerl.engine.engine import Engine
from rhymerl.errors import ConfigError, require_at_least
from rhymerl.history import HistoryStore
from rhymerl.history.answers import answers_of
from rhymerl.history.traces import record_of, record_of_past
from rhymerl.progress import SILENT, ProgressBar
from rhymerl.report.printing import say
from rhymerl.runs.replay import Replay, ReplayTotals
from rhymerl.testing import OracleDrafter
from rhymerl.types import Completion, RolloutRequest, Sample

NONE, NGRAM, ORACLE = "none", "ngram", "oracle"
FIRST_EPOCH = "_first_epoch"  # behind the name of a drafter that was given no history


@dataclass(slots=True, kw_only=True)
class Contender:
    """An engine with a drafter, and how long it took for each pair."""

    name: str
    drafter: Drafter
    engine: Engine
    history: HistoryStore
    epochs: int  # of history that it was given
    seconds: list[float] = field(default_factory=list)
    tokens: int = 0
    equal: int = 0  # answers that are those of no drafter
    answers: int = 0

    def run(self, requests: Sequence[RolloutRequest]) -> list[Completion]:
        """Answer all requests, timed; what was learned of running answers is forgotten afterwards."""
        finished: list[Completion] = []
        started = time.perf_counter()
        self.engine.submit(requests)
        while self.engine.has_work:
            finished += self.engine.run()
        self.seconds.append(time.perf_counter() - started)
        self.drafter.follow(self.history.deltas(self.history.version))
        return finished

    def count(self, answers: Sequence[Completion], plain: Sequence[Completion]) -> None:
        """Compare with the answers without drafts."""
        self.tokens += sum(len(each.token_ids) for each in answers)
        self.answers += len(answers)
        self.equal += sum(np.array_equal(a.token_ids, b.token_ids) for a, b in zip(answers, plain, strict=True))


class RolloutBench(PolicyBench):
    """`pairs` rounds at each concurrency; in a round all contenders answer the same requests with the same noise."""

    def __init__(self, config: DictConfig) -> None:
        require_at_least({"pairs": (config.pairs, 1), "epochs": (config.epochs, 0)}, error=ConfigError)
        super().__init__(config)
        self.history: HistoryStore = instantiate(config.history, key="history")

    def run(self, progress: ProgressBar = SILENT) -> dict[str, Any]:
        """Return the rows by concurrency and drafter, and the cost of a pass."""
        with progress.during("epochs of history", self.config.epochs):
            for epoch in range(self.config.epochs):
                self._learn(epoch)
                progress.advance()
        most_running = max(self.config.concurrency)
        costs = measure_costs(self.policy.model, self.requests("costs"), most_running=most_running, progress=progress)
        rows = [row for concurrency in self.config.concurrency for row in self._compare(concurrency, costs, progress)]
        return {"rows": rows, "costs": costs.points(), "environment": environment(), "config": recorded(self.config)}

    def _learn(self, epoch: int) -> None:
        """Learn one epoch of history."""
        requests = self.requests(f"history {epoch}")
        plain = self._contender(NONE, NoDrafter(), max(self.config.concurrency), epochs=0)
        for prompt, group in answers_of([_unscored(each) for each in _in_order(plain.run(requests), requests)], epoch):
            self.history.add(prompt, group)

    def _contender(self, name: str, drafter: Drafter, concurrency: int, *, epochs: int) -> Contender:
        history = self.history if epochs else HistoryStore()
        drafter.follow(history.snapshot())
        budget: Budget = instantiate(self.config.budget, key="budget")
        engine = Engine(self.policy.model, drafter=drafter, budget=budget, max_running=concurrency)
        return Contender(name=name, drafter=drafter, engine=engine, history=history, epochs=epochs)

    def _contenders(self, concurrency: int) -> list[Contender]:
        """Return the contenders, no drafter first: its answers are the oracle's."""
        epochs = self.config.epochs
        name = _short_name(self.config.drafter["_target_"])
        with_history = [(name if each else name + FIRST_EPOCH, each) for each in sorted({0, epochs})]
        drafters: list[tuple[str, Drafter, int]] = [
            (NONE, NoDrafter(), 0),
            (NGRAM, NGramDrafter(), 0),
            *((name, instantiate(self.config.drafter, key="drafter"), each) for name, each in with_history),
            (ORACLE, OracleDrafter({}), 0),
        ]
        return [self._contender(name, drafter, concurrency, epochs=each) for name, drafter, each in drafters]

    def _compare(self, concurrency: int, costs: CostTable, progress: ProgressBar) -> Iterator[dict[str, Any]]:
        contenders = self._contenders(concurrency)
        try:
            with progress.during(f"rounds with {concurrency} running", 1 + self.config.pairs):
                for pair in range(-1, self.config.pairs):  # the first round warms up
                    plain = self._round(contenders, concurrency, pair)
                    progress.advance()
            predicted = {each.name: self._predict(each, concurrency, plain, costs) for each in contenders}
        finally:
            for each in contenders:
                each.drafter.close()
        yield from _rows(contenders, concurrency, predicted)

    def _round(self, contenders: Sequence[Contender], concurrency: int, pair: int) -> list[Completion]:
        requests = self.requests(f"bench {pair}")[: self.config.requests_per_slot * concurrency + 16]
        plain: list[Completion] = []
        for each in _rotated(contenders, pair):
            if isinstance(each.drafter, OracleDrafter):
                each.drafter.answers = {c.request.id: c.token_ids for c in plain}
            answers = _in_order(each.run(requests), requests)
            plain = plain or answers
            each.count(answers, plain)
        if pair < 0:
            for each in contenders:
                each.seconds.clear()
                each.tokens = 0
        return plain

    def _predict(
        self,
        contender: Contender,
        concurrency: int,
        plain: Sequence[Completion],
        costs: CostTable,
    ) -> float | None:
        """Return replay's speed-up for the last round's answers, at measured costs of passes and free drafting."""
        if contender.name in (NONE, NGRAM, ORACLE):
            return None
        past = [(each, of) for of in contender.history.snapshot() for each in of.added]
        records = [record_of_past(each, of.key, of.prompt_token_ids) for each, of in past]
        records += [record_of(_unscored(each), self.config.epochs) for each in plain]
        settings = {"costs": costs, "max_running": concurrency, "from_epoch": self.config.epochs}
        # Epochs pass faster in replay than a background thread builds indexes, so it has to be waited for.
        waits = {"deterministic": True} if "deterministic" in self.config.drafter else {}
        drafter = instantiate({**self.config.drafter, **waits}, key="drafter")
        budget: Budget = instantiate({**self.config.budget, "costs": costs}, key="budget")
        try:
            drafted = Replay(drafter, budget, **settings).run(records)
            undrafted = Replay(NoDrafter(), FixedBudget(0), **settings).run(records)
        finally:
            drafter.close()
        return sum(undrafted.values(), ReplayTotals()).cost / sum(drafted.values(), ReplayTotals()).cost


def _short_name(target: str) -> str:
    """Return `history_tree` for `rhymerl.drafters.HistoryTreeDrafter`."""
    words = re.findall("[A-Z]+[a-z0-9]*|[a-z0-9_]+", target.rpartition(".")[2].removesuffix("Drafter"))
    return "_".join(words).lower()


def _rotated(contenders: Sequence[Contender], pair: int) -> list[Contender]:
    """Put no drafter first, for the oracle's sake; the others take turns in going next."""
    first, *others = contenders
    turn = pair % len(others)
    return [first, *others[turn:], *others[:turn]]


def _in_order(completions: Sequence[Completion], requests: Sequence[RolloutRequest]) -> list[Completion]:
    by_id = {each.request.id: each for each in completions}
    return [by_id[request.id] for request in requests]


def _unscored(completion: Completion) -> Sample:
    return Sample(
        completion=completion,
        text="",
        reward=0.0,
        rewards={},
        loss_mask=np.ones(len(completion.token_ids), np.bool_),
    )


def _rows(
    contenders: Sequence[Contender], concurrency: int, predicted: Mapping[str, float | None]
) -> Iterator[dict[str, Any]]:
    plain, oracle = contenders[0], contenders[-1]
    ceiling = SpeedRatio.of(plain.seconds, oracle.seconds).median
    for each in contenders:
        ratio, totals = SpeedRatio.of(plain.seconds, each.seconds), each.engine.totals
        yield {
            "drafter": each.name,
            "history_epochs": each.epochs,
            "concurrency": concurrency,
            "tokens_per_s": each.tokens / sum(each.seconds),
            "speedup": ratio.median,
            "speedup_low": ratio.low,
            "speedup_high": ratio.high,
            "fraction_of_oracle": ratio.median / ceiling,
            "predicted_speedup": predicted[each.name],
            "accept_length": totals.emitted_tokens / max(totals.request_passes, 1),
            "accept_rate": totals.accepted_nodes / max(totals.drafted_nodes, 1),
            "nodes_per_pass": totals.drafted_nodes / max(totals.passes, 1),
            "draft_time_frac": totals.draft_s / max(totals.busy_s, 1e-9),
            "equal_answers": each.equal / max(each.answers, 1),
        }


def report(result: Mapping[str, Any]) -> None:
    """Print the rows as a table for each number of running requests, which fits 80 columns."""
    for concurrency, rows in groupby(result["rows"], key=lambda row: row["concurrency"]):
        table = Table(title=f"Rollout speed, {concurrency} running", title_justify="left", padding=(0, 0))
        table.add_column("drafter", no_wrap=True)
        table.add_column("tok/s", justify="right")
        table.add_column("times as fast", justify="right", no_wrap=True)
        for name in ("oracle", "predicted", "accept", "equal"):
            table.add_column(name, justify="right")
        for row in rows:
            fast = f"{row['speedup']:.2f} {row['speedup_low']:.2f}-{row['speedup_high']:.2f}"
            others = ("fraction_of_oracle", "predicted_speedup", "accept_length", "equal_answers")
            cells = (f"{row[name]:.3g}" if row[name] is not None else "" for name in others)
            table.add_row(row["drafter"], f"{row['tokens_per_s']:,.0f}", fast, *cells)
        Console().print(table)
    say("with the median's 95 % interval; oracle: share of its speed; predicted: by replay; accept: tokens a pass")
