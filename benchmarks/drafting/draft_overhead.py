"""The overhead of drafting: rollouts with the default drafter and budget over rollouts without, in a grid of workloads.

Each cell is a pair of rollout loops over the same policy, which answer the same requests step by step, in alternating
order: history tree and goodput, and no drafter. A step is timed from its requests to what history and drafter have
learned of it. Cells differ in the rows that decode side by side, in the longest answer, in the policy (`random` never
repeats itself, `trained` is the quickstart's), and in the prompts: `fresh` ones each step, or the same ones again
(`repeated`), of which `epoch 1` is the first time. A ratio is the step with drafts over that without; the interval is
that of the median at 95 %, by bootstrap over the steps. A cell whose interval lies above --limit is measured once more,
and the second result counts.

    python -m benchmarks.drafting.draft_overhead [--rows 1 8 64 256] [--tokens 8 32 128 512] [--seconds 6]
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

import numpy as np

from benchmarks import record
from benchmarks.regression import echo_task
from rhymerl.backends.embedded import EmbeddedBackend
from rhymerl.bench.base import SpeedRatio
from rhymerl.budgets import GoodputBudget
from rhymerl.drafters import Drafter, HistoryTreeDrafter, NoDrafter
from rhymerl.models.policy import Policy, PolicySource
from rhymerl.rewards import RewardScorer
from rhymerl.rollout import RolloutLoop, RolloutSettings
from rhymerl.schedulers.fifo import FIFOScheduler
from rhymerl.testing import make_prompt
from rhymerl.types import Prompt

GROUP = 8
PROMPT_TOKENS = 8
STEPS = 4, 40  # at least and at most, of each kind


@dataclass(frozen=True)
class Cell:
    """One workload."""

    policy: str
    rows: int
    tokens: int
    prompts: str

    def draw(self, step: int, vocabulary: int) -> list[Prompt]:
        """The step's prompts: as many as fill the rows."""
        source = np.random.default_rng([self.rows, self.tokens, step if self.prompts == "fresh" else 0])
        count = max(self.rows // GROUP, 1)
        return [make_prompt(source.integers(2, vocabulary, PROMPT_TOKENS)) for _ in range(count)]


class Side:
    """A rollout loop that is timed."""

    def __init__(self, cell: Cell, policy: Policy, drafter: Drafter, stack: ExitStack) -> None:
        backend = stack.enter_context(EmbeddedBackend(max_running=cell.rows))
        backend.start(policy, drafter, budget=GoodputBudget())
        self.loop = RolloutLoop(
            backend,
            FIFOScheduler(),
            scorer=stack.enter_context(RewardScorer([])),
            decode=lambda token_ids: "",
            stop_token_ids=policy.stop_token_ids,
        )
        context = policy.model.config.max_position_embeddings
        self.settings = RolloutSettings(
            group_size=min(GROUP, cell.rows), max_tokens=min(cell.tokens, context - PROMPT_TOKENS)
        )

    def run(self, prompts: Sequence[Prompt], step: int, epoch: int) -> float:
        started = time.perf_counter()
        self.loop.sync_weights([], policy_version=step)
        self.loop.run(prompts, step, self.settings, epoch=epoch)
        return time.perf_counter() - started


def measure(cell: Cell, policy: Policy, seconds: float) -> dict[str, Any]:
    """A row of the table: the median of the steps' ratios, and its bounds at 95 %."""
    vocabulary = policy.model.config.vocab_size
    taken: tuple[list[float], list[float]] = [], []  # seconds without drafts, and with
    with ExitStack() as stack:
        sides = [Side(cell, policy, drafter, stack) for drafter in (NoDrafter(), HistoryTreeDrafter())]
        for side in sides:
            side.run(cell.draw(10**6, vocabulary), 10**6, 0)
        started = time.perf_counter()
        while (step := len(taken[0])) < STEPS[0] or (step < STEPS[1] and time.perf_counter() - started < seconds):
            prompts, epoch = cell.draw(step, vocabulary), step if cell.prompts == "repeated" else 0
            for number in (0, 1) if step % 2 else (1, 0):
                taken[number].append(sides[number].run(prompts, step, epoch))
    ratio = SpeedRatio.of(taken[1], taken[0])
    bounds = {name: round(value, 4) for name, value in asdict(ratio).items()}
    return {**asdict(cell), "steps": len(taken[0]), **bounds}


def main(words: Sequence[str] | None = None) -> dict[str, Any]:
    parser = record.options(__doc__)
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 64, 256])
    parser.add_argument("--tokens", nargs="+", type=int, default=[8, 32, 128, 512])
    parser.add_argument("--policies", nargs="+", choices=("random", "trained"), default=["random", "trained"])
    parser.add_argument("--prompts", nargs="+", choices=("fresh", "repeated"), default=["fresh", "repeated"])
    parser.add_argument("--seconds", type=float, default=6.0, help="for each cell")
    parser.add_argument("--limit", type=float, default=1.03)
    arguments = parser.parse_args(words)
    record.set_threads(arguments.threads)
    start = record.environment()
    sources = {
        "random": PolicySource(
            init={**echo_task.MODEL, "max_position_embeddings": 1024}, characters=echo_task.CHARACTERS
        ),
        "trained": PolicySource("rhymerl/assets/quickstart_policy"),
    }
    rows = []
    for name in arguments.policies:
        policy = sources[name].load()
        policy.model.eval()
        for cell in map(Cell, *zip(*product([name], arguments.rows, arguments.tokens, arguments.prompts), strict=True)):
            row = measure(cell, policy, arguments.seconds)
            if row["low"] > arguments.limit:
                row = {**measure(cell, policy, arguments.seconds), "again": True}
            record.note_row(row)
            rows.append(row)
    worst = max(rows, key=lambda row: row["median"])
    return record.finish("draft_overhead", __doc__, arguments, rows=rows, start=start, worst=worst)


if __name__ == "__main__":
    main()
