"""The cost of a pass on this machine, by the requests and the draft nodes in it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from transformers import PreTrainedModel

from rhymerl.budgets import FixedBudget
from rhymerl.costs import Amounts, PassCost
from rhymerl.drafters.base import Drafter
from rhymerl.drafts import Draft
from rhymerl.engine.engine import Engine
from rhymerl.progress import SILENT, ProgressBar
from rhymerl.report.printing import print_table, say
from rhymerl.types import FloatArray, IntArray, RolloutRequest

_ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
_NOT_COUNTED = 3  # passes: prefill, and the first ones of these shapes
NODES = (0, 1, 2, 4, 8, 16, 32)  # of each request


class PathDrafter(Drafter):
    """A path of `nodes` tokens that nothing stands for; some are accepted by chance."""

    def __init__(self, nodes: int, *, vocabulary: int) -> None:
        self.nodes = nodes
        self.vocabulary = vocabulary

    def propose(self, request: RolloutRequest, context: IntArray, budget: int) -> Draft:
        tokens = (int(context[-1]) + 1 + np.arange(min(self.nodes, budget), dtype=np.int32)) % self.vocabulary
        return Draft(token_ids=tokens, parents=np.arange(-1, len(tokens) - 1, dtype=np.int32))


class CostTable(PassCost):
    """Seconds of a pass, measured at some numbers of requests and of nodes a request, and straight between them."""

    def __init__(self, rows: Sequence[int], nodes: Sequence[int], seconds: FloatArray) -> None:
        """Make a table of `seconds` [rows, nodes]."""
        self.rows = np.array(rows, np.float64)
        self.nodes = np.array(nodes, np.float64)
        self.table = seconds

    def seconds(
        self, rows: Amounts, nodes: Amounts, asked: Amounts, *, prompt_tokens: Amounts = 0, seen: Amounts | None = None
    ) -> FloatArray:
        """Return the times; a prompt's token costs what a node does."""
        rows, nodes = np.broadcast_arrays(rows, np.asarray(nodes, np.float64) + prompt_tokens)
        columns = np.array([np.interp(nodes / rows, self.nodes, line) for line in self.table])  # [rows, ...]
        flat = zip(rows.ravel(), columns.reshape(len(self.rows), -1).T, strict=True)
        return np.array([np.interp(float(number), self.rows, column) for number, column in flat]).reshape(rows.shape)

    def points(self) -> list[list[float]]:
        """Return [tokens, seconds] for `budget.costs`: medians of passes with about as many tokens, never falling."""
        tokens = (self.rows[:, None] * (1 + self.nodes)).ravel()
        bins = np.round(2 * np.log2(tokens))
        middle = [(tokens[bins == b].mean(), np.median(self.table.ravel()[bins == b])) for b in np.unique(bins)]
        return _rising([each for each, _ in middle], [cost for _, cost in middle])

    def points_at(self, rows: int) -> list[list[float]]:
        """Return [tokens, seconds] of passes over exactly so many requests, one of `self.rows`, by nodes.

        Fewer tokens than these requests have are of passes over fewer requests, without nodes.
        """
        here = int(np.flatnonzero(self.rows == rows)[0])
        fewer, own = self.rows[:here], rows * (1 + self.nodes)
        return _rising([*fewer, *own], [*self.table[:here, 0], *self.table[here]])


def _rising(tokens: Sequence[float], seconds: Sequence[float]) -> list[list[float]]:
    pairs = zip(tokens, np.maximum.accumulate(seconds), strict=True)
    return [[round(float(count), 1), float(f"{cost:.4g}")] for count, cost in pairs]


def measure_costs(
    model: PreTrainedModel,
    requests: Sequence[RolloutRequest],
    *,
    most_running: int,
    nodes: Sequence[int] = NODES,
    passes: int = 12,
    rounds: int = 3,
    progress: ProgressBar = SILENT,
) -> CostTable:
    """Return the medians of `passes` decoding passes each, drafting and everything around the forward included.

    The least of `rounds` goes over the whole table: what else the machine does at times is no cost of ours.
    """
    rows = [each for each in _ROWS if each <= most_running]
    tables = np.empty((rounds, len(rows), len(nodes)))
    sizes = sum(rows) * sum(1 + each for each in nodes)  # tokens are what takes the time
    with progress.during("tokens in passes", rounds * (passes + _NOT_COUNTED) * sizes):
        for number, row, column in np.ndindex(tables.shape):
            tables[number, row, column] = _seconds(model, requests, rows[row], nodes[column], passes, progress)
    return CostTable(rows, nodes, tables.min(axis=0))


def _seconds(
    model: PreTrainedModel,
    requests: Sequence[RolloutRequest],
    rows: int,
    nodes: int,
    passes: int,
    progress: ProgressBar,
) -> float:
    drafter = PathDrafter(nodes, vocabulary=model.config.get_text_config().vocab_size)
    engine = Engine(model, drafter=drafter, budget=FixedBudget(nodes), max_running=rows)
    sampling = replace(requests[0].sampling, stop_token_ids=())
    engine.submit([replace(requests[i % len(requests)], id=str(i), sampling=sampling) for i in range(rows)])
    seconds: list[float] = []
    with engine.forward.ready():
        while len(seconds) < passes + _NOT_COUNTED and engine.has_work:
            started = time.perf_counter()
            engine.step()
            seconds.append(time.perf_counter() - started)
            progress.advance(rows * (1 + nodes))
    engine.withdraw()
    progress.advance((passes + _NOT_COUNTED - len(seconds)) * rows * (1 + nodes))  # of answers that were short
    return float(np.median(seconds[_NOT_COUNTED:]))


def report(table: CostTable) -> None:
    """Print milliseconds by running requests and nodes."""
    say("Milliseconds of a pass, by running requests and draft nodes of each")  # a title would take the table's width
    by_rows = zip(table.rows, table.table, strict=True)
    print_table(
        ["running", *(f"{each:.0f}" for each in table.nodes)],
        ([f"{rows:.0f}", *(f"{1e3 * each:.3g}" for each in seconds)] for rows, seconds in by_rows),
    )
