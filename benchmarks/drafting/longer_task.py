"""Rollouts of a real model's run with drafts over rollouts without, by running requests, and what passes allow.

A run is trained as its config says. In every `--every`-th step from epoch `--from-epoch` on (the first is 1), other
engines answer the same requests with the same weights: for each number of running requests one without drafts, and one
with the run's drafter and budget. Their order turns from step to step. `had` is the ratio of their seconds a token.

`allowed` is the best speed-up that a replay of the run's answers finds at the cost of these very passes: a line over
the tokens of a pass, fitted to those of both engines that computed no prompt. It is the better one of the default
budget that is told this line and the best fixed number of nodes of the epoch (`best`; "goodput" is the budget). `share`
is had / allowed. Drafters of the replay learn after an epoch, those of the run after a step.

    rhymerl warmstart --config warmstart_smollm2_sums warmstart.precision=bf16-mixed
    python -m benchmarks.drafting.longer_task [key=value ...] trainer.precision=bf16-mixed
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

from benchmarks import record
from benchmarks.emulation import emulation_check
from rhymerl.backends.embedded import EmbeddedBackend
from rhymerl.budgets import Budget, FixedBudget, GoodputBudget
from rhymerl.config import compose, instantiate
from rhymerl.costs import CostCurve
from rhymerl.drafters import Drafter, HistoryTreeDrafter, NoDrafter
from rhymerl.engine.totals import PassRecord
from rhymerl.history.traces import TraceRecord, read_trace
from rhymerl.rollout import requests_of
from rhymerl.runs.fit import fit
from rhymerl.runs.replay import Replay, ReplayTotals
from rhymerl.training.module import RhymeModule
from rhymerl.types import RolloutRequest

NODES = (1, 2, 4, 8, 16)  # of the fixed budgets in the replay
WARM_UP = 16  # passes after an update, for which whoever comes first would need twice as long
LONGEST = 512  # tokens of a prompt and its answer, for which an engine has room in each slot


class Engine(NamedTuple):
    """One of the engines beside the run's own."""

    running: int
    drafts: bool


class Taken(NamedTuple):
    """What an engine's rollout of a step took."""

    seconds: float
    tokens: int


class Pairs:
    """The engines with and without drafts, from the first step on, and their times; used from within a training."""

    def __init__(self, running: Sequence[int], config: Any, stack: ExitStack) -> None:
        self.config = config
        self.stack = stack
        self.engines = [Engine(number, drafts) for number in running for drafts in (False, True)]
        self.backends: dict[Engine, EmbeddedBackend] = {}
        self.records: dict[Engine, list[PassRecord]] = defaultdict(list)
        self.taken: dict[int, list[dict[Engine, Taken]]] = defaultdict(list)  # a measured step, by epoch

    def answer(self, module: RhymeModule, prompts: Any, *, epoch: int) -> None:
        """Let all of them answer a step's prompts, before the run does; their order turns from step to step."""
        if not self.backends:
            self.backends = {engine: self._start(module, engine) for engine in self.engines}
        step, stops = module.num_rollouts, module.policy.stop_token_ids
        requests = requests_of(prompts, step, module.rollout, seed=module.seed, stop_token_ids=stops)
        turn = sum(map(len, self.taken.values())) % len(self.engines)
        self._warm_up(self.backends[self.engines[turn]], requests, step)
        taken = {}
        for engine in self.engines[turn:] + self.engines[:turn]:
            backend = self.backends[engine]
            backend.sync_weights([], policy_version=step)
            backend.follow(module.history)
            started, done = time.perf_counter(), []
            backend.submit(requests)
            while len(done) < len(requests):
                done += backend.collect()
            taken[engine] = Taken(time.perf_counter() - started, sum(len(each.token_ids) for each in done))
            backend.metrics()
        self.taken[epoch].append(taken)

    def _start(self, module: RhymeModule, engine: Engine) -> EmbeddedBackend:
        drafter: Drafter = instantiate(self.config.drafter) if engine.drafts else NoDrafter()
        budget: Budget = instantiate(self.config.budget) if engine.drafts else FixedBudget(0)
        sizes = {"max_running": engine.running, "kv_tokens": engine.running * LONGEST}
        backend = self.stack.enter_context(EmbeddedBackend(**sizes))
        backend.start(module.policy, drafter, budget=budget, autocast=module.trainer.precision_plugin.forward_context)
        backend.engine.observers.append(self.records[engine].append)
        return backend

    @staticmethod
    def _warm_up(backend: EmbeddedBackend, requests: Sequence[RolloutRequest], step: int) -> None:
        backend.sync_weights([], policy_version=step)
        backend.submit(requests)
        backend.collect(max_passes=WARM_UP)
        backend.withdraw()
        backend.metrics()

    def a_token(self, engine: Engine, epochs: Sequence[int]) -> float:
        """Return an engine's seconds of a token in these epochs."""
        some = [step[engine] for epoch in epochs for step in self.taken[epoch]]
        return sum(each.seconds for each in some) / sum(each.tokens for each in some)

    def passes(self, running: int) -> list[emulation_check.Pass]:
        """Return tokens, keys (none) and seconds of passes without prompts over at most `running` requests."""
        records = [each for drafts in (False, True) for each in self.records[Engine(running, drafts)]]
        return [(each.tokens, 0, 0, each.seconds) for each in records if not each.prompt_tokens]


def trained(config: Any, pairs: Pairs, *, from_epoch: int, every: int) -> list[TraceRecord]:
    """Train, with rollouts of the other engines before some of the steps; return the run's own answers."""
    train_step = RhymeModule.training_step

    def training_step(module: RhymeModule, batch: Any, batch_idx: int) -> Any:
        epoch = module.trainer.datamodule.train_loader.epoch  # type: ignore[attr-defined]
        if epoch + 1 >= from_epoch and module.num_rollouts % every == 0:
            pairs.answer(module, batch.prompts, epoch=epoch)
            print(f"step {module.num_rollouts}: {pairs.taken[epoch][-1]}", file=sys.stderr, flush=True)
        return train_step(module, batch, batch_idx)

    with patch.object(RhymeModule, "training_step", training_step):
        fit(config)
    return list(read_trace(Path(config.run_dir) / "rollouts.jsonl.gz"))


def replayed(
    records: Sequence[TraceRecord], points: Sequence[Sequence[float]], *, running: int
) -> dict[str, dict[int, ReplayTotals]]:
    """Return the totals by epoch of plain decoding and of each budget, by name, with passes that cost `points`."""
    budgets: dict[str, Budget] = {"plain": FixedBudget(0)}
    budgets |= {"goodput": GoodputBudget(costs=points, deterministic=True)}
    budgets |= {str(nodes): FixedBudget(nodes) for nodes in NODES}
    found = {}
    for name, budget in budgets.items():
        drafter = NoDrafter() if name == "plain" else HistoryTreeDrafter(deterministic=True)
        found[name] = Replay(drafter, budget, costs=CostCurve(points), max_running=running).run(records)
        drafter.close()
    return found


def rows_of(pairs: Pairs, records: Sequence[TraceRecord], running: int) -> list[dict[str, Any]]:
    points, _ = emulation_check.fitted(pairs.passes(running))
    costs = replayed(records, points, running=running)
    rows = [row_of(pairs, running, [epoch], costs) for epoch in pairs.taken]
    curve = " ".join(f"{tokens:.0f}:{1e3 * seconds:.3g}" for tokens, seconds in points)
    return [*rows, {**row_of(pairs, running, list(pairs.taken), costs), "curve_ms": curve}]


def row_of(
    pairs: Pairs, running: int, epochs: Sequence[int], costs: Mapping[str, Mapping[int, ReplayTotals]]
) -> dict[str, Any]:
    one, two = (pairs.a_token(Engine(running, drafts), epochs) for drafts in (False, True))
    cost = {name: sum(totals[epoch].cost for epoch in epochs) for name, totals in costs.items()}
    best = min(cost, key=lambda name: cost[name])
    had, allowed = one / two, cost["plain"] / cost[best]
    return {
        "running": running,
        "epoch": "all" if len(epochs) > 1 else epochs[0] + 1,
        "plain_ms_per_token": round(1e3 * one, 2),
        "ms_per_token": round(1e3 * two, 2),
        "had": round(had, 3),
        "allowed": round(allowed, 3),
        "best": best,
        "share": round(had / allowed, 3),
    }


def main(words: Sequence[str] | None = None) -> dict[str, Any]:
    parser = record.options(__doc__, config="smollm2_sums", running=[8, 32], from_epoch=3, every=4, settings=True)
    arguments = record.begin(parser, words)
    with ExitStack() as stack, tempfile.TemporaryDirectory() as folder:
        own = [f"seed={arguments.seed}", f"run_dir={Path(folder) / 'run'}", "record_rollouts=true", "report=false"]
        config = compose(arguments.config, ["trainer.limit_val_batches=0", *own, *arguments.settings])
        pairs = Pairs(arguments.running, config, stack)
        records = trained(config, pairs, from_epoch=arguments.from_epoch, every=arguments.every)
        rows = [row for running in arguments.running for row in rows_of(pairs, records, running)]
    by_epoch: dict[int, list[float]] = defaultdict(list)
    for each in records:
        by_epoch[each.epoch].append(each.reward)
    rewards = {str(epoch + 1): round(sum(values) / len(values), 3) for epoch, values in by_epoch.items()}
    return record.finish("longer_task", __doc__, arguments, rows=rows, reward_by_epoch=rewards)


if __name__ == "__main__":
    main()
