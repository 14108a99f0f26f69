"""The cost of an SGLang pass by its requests and draft nodes; `backend.costs` chooses `nodes` from this curve."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

import numpy as np

from rhymerl.backends.base import RolloutBackend
from rhymerl.backends.sglang.nodes import best_n
from rhymerl.bench.costs import CostTable, PathDrafter
from rhymerl.budgets import FixedBudget
from rhymerl.costs import CostCurve
from rhymerl.drafters.base import Drafter
from rhymerl.drafters.none import NoDrafter
from rhymerl.errors import BackendError, ConfigError
from rhymerl.models.policy import Policy
from rhymerl.report.printing import print_table, say
from rhymerl.types import Completion, RolloutRequest

NODES = (0, 1, 3, 7, 15)  # of each request; for each of these an engine is started
PASSES = 64
_APART = 1.6  # times as long a pass of one request's as of another's: they were not in the same passes


@dataclass(frozen=True, slots=True, kw_only=True)
class Flown:
    """Requests that were sent together: how long it took until each was back, and the passes that each was in."""

    seconds: Sequence[float]
    passes: Sequence[int]

    @property
    def took_s(self) -> float:
        return max(self.seconds)

    @property
    def num_passes(self) -> int:
        """Return the number of the engine's passes, if all requests ran at the same time."""
        return max(self.passes)

    @property
    def ran_side_by_side(self) -> bool:
        """Return whether requests with similar numbers of passes took similar times, so none waited for another."""
        each = [s / n for s, n in zip(self.seconds, self.passes, strict=True) if 2 * n >= self.num_passes]
        return max(each) < _APART * min(each)


def pass_seconds(short: Sequence[Flown], long: Sequence[Flown]) -> float:
    """Return the time of one of the passes that long answers take and short ones do not.

    Starts, prefills and ends cancel out. The least time of either counts: what else the machine does at times is no
    cost of ours. Raises BackendError when the time between them cannot be told from noise, or when not all requests
    were in the same passes.
    """
    one, two = (min(each, key=lambda flown: flown.took_s) for each in (short, long))
    if not two.ran_side_by_side:
        raise BackendError(
            f"the SGLang engine does not run {len(two.passes)} requests side by side: its memory for keys and values is too small "
            "(backend.arguments.mem_fraction_static, max_total_tokens), or the machine too busy; else lower backend.max_running"
        )
    seconds = (two.took_s - one.took_s) / max(two.num_passes - one.num_passes, 1)
    if seconds <= 0:
        raise BackendError(
            f"{two.num_passes} passes took no longer than {one.num_passes}: the machine is too busy, or measure.passes too few"
        )
    return seconds


@dataclass(eq=False)
class SGLangCosts:
    """Starts an engine for each of `nodes` in turn, and keeps each of the numbers of requests in `rows` running in it.

    `make` returns a backend for a number of nodes; 0 nodes are always among them. The answers, of `passes` and of twice
    as many tokens, end at no stop token. The tokens drafted for them stand for nothing and are hardly ever accepted,
    but fill the tree of every request and pass. As with the embedded engine, all that lies between two passes is in the
    cost of one, drafting too: PathDrafter's own, a few microseconds a request, and not what a drafter with a history
    takes. Raises BackendError for figures that mean nothing.
    """

    make: Callable[[int], RolloutBackend]
    policy: Policy
    requests: Sequence[RolloutRequest]
    _: KW_ONLY
    rows: Sequence[int]
    nodes: Sequence[int] = NODES
    passes: int = PASSES
    rounds: int = 3

    def __post_init__(self) -> None:
        longest = max(len(request.prompt.token_ids) for request in self.requests) + 2 * self.passes
        if longest > (context := self.policy.context_tokens):
            raise ConfigError(
                f"measure.passes={self.passes}: prompts and twice as many tokens are {longest}; the model's context is {context}"
            )
        self.rows = sorted(set(self.rows))
        self.nodes = sorted({0, *self.nodes})

    def run(self) -> CostTable:
        """Run all of it; says how far it is."""
        say(f"SGLang engines to start, one after another: {len(self.nodes)}; each takes 20 to 60 s")
        columns = [self._of_engine(nodes) for nodes in self.nodes]
        return CostTable(self.rows, self.nodes, np.array(columns).T)

    def _of_engine(self, nodes: int) -> list[float]:
        vocabulary = self.policy.model.config.get_text_config().vocab_size
        drafter: Drafter = PathDrafter(nodes, vocabulary=vocabulary) if nodes else NoDrafter()
        started = time.perf_counter()
        with self.make(nodes) as backend:
            backend.start(self.policy, drafter, budget=FixedBudget(nodes))
            backend.sync_weights(self.policy.named_weights(), 0)
            say(f"{nodes} nodes: the engine is up after {time.perf_counter() - started:.0f} s")
            seconds = [self._of_rows(backend, rows) for rows in reversed(self.rows)]  # too little memory shows at first
            return seconds[::-1]

    def _of_rows(self, backend: RolloutBackend, rows: int) -> float:
        self._answered(backend, rows, self.passes)  # compiles, and leaves the prompts' keys and values
        short, long = [], []
        for _ in range(self.rounds):
            short.append(self._answered(backend, rows, self.passes))
            long.append(self._answered(backend, rows, 2 * self.passes))
        seconds = pass_seconds(short, long)
        say(f"  {rows} running: {1e3 * seconds:.3g} ms a pass")
        return seconds

    def _answered(self, backend: RolloutBackend, rows: int, num_tokens: int) -> Flown:
        sampling = replace(self.requests[0].sampling, stop_token_ids=(), max_tokens=num_tokens)
        requests = [replace(self.requests[i % len(self.requests)], id=str(i), sampling=sampling) for i in range(rows)]
        back: list[tuple[float, Completion]] = []
        started = time.perf_counter()
        backend.submit(requests)
        while len(back) < rows:
            completed = backend.collect()
            back += [(time.perf_counter() - started, each) for each in completed]
        return Flown(seconds=[s for s, _ in back], passes=[each.num_passes for _, each in back])


def result_of(table: CostTable, accept_rate: float) -> Mapping[str, Any]:
    """Return the content of the file: the curve at the most running requests, and beside it all that was measured."""
    rows = [int(each) for each in table.rows]
    return {
        "engine": "sglang",
        "costs": table.points_at(rows[-1]),
        "max_running": rows[-1],
        "table": {
            "rows": rows,
            "nodes": [int(each) for each in table.nodes],
            "seconds": [[float(f"{cost:.4g}") for cost in line] for line in table.table],
            "best_nodes": [best_n(CostCurve(table.points_at(each)), each, accept_rate) - 1 for each in rows],
        },
    }


def report(result: Mapping[str, Any], accept_rate: float) -> None:
    """Print milliseconds by running requests and nodes."""
    found = result["table"]
    lines = zip(found["rows"], found["seconds"], found["best_nodes"], strict=True)
    print_table(
        ["running", *map(str, found["nodes"]), f"best at {accept_rate:g} accepted"],
        ([str(rows), *(f"{1e3 * cost:.3g}" for cost in line), str(best)] for rows, line, best in lines),
        title="Milliseconds of a pass, by draft nodes",
    )
