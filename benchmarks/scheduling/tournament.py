"""Schedulers of this package and rules of other systems, simulated on the same lengths: speed, bias, staleness.

Rows by workload (workloads.py) and rule (peers/ has those of other systems, and what each leaves out). `steps` says
what a rule may do: all answers by the newest policy, behind a barrier, or one step off, `run_ahead=keep`. Training
takes no time, a pass over B requests costs 1 + B / 128, and all of a worker's requests run side by side unless the
workload has slots. As of commit 3516d75 there are rules that end a step early, too.

tokens            trained on in a unit of time, over FIFO behind a barrier (median and range over seeds)
bound             the same without bubbles in full batches, or if every longest answer ran alone, whichever is less
idle              share of worker time without work
p99               time until an answer's last token, from when it could begin, 99th percentile,
                  in steps of FIFO behind a barrier
stale, oldest     share of tokens that an older policy sampled; how old, in steps

    python -m benchmarks.scheduling.tournament
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks import record
from benchmarks.scheduling.peers.laminar import LaminarScheduler
from benchmarks.scheduling.peers.longest_first import LongestFirstScheduler
from benchmarks.scheduling.peers.seer import SeerScheduler
from benchmarks.scheduling.workloads import WORKLOADS, Workload
from rhymerl.schedulers import (
    FIFOScheduler,
    HistoPipeScheduler,
    PacedScheduler,
    PackedScheduler,
    Scheduler,
    SortedScheduler,
)
from rhymerl.simulation.base import Decoding, StepWork
from rhymerl.simulation.comparison import RUN_OUT
from rhymerl.simulation.pipeline import Simulation
from rhymerl.simulation.summary import Window, summary

if TYPE_CHECKING:
    from rhymerl.types import FloatArray

ON_POLICY, ONE_OFF = "on-policy", "one step off"
LOOKS = 10  # in the time that an answer of mean length takes, a rule may move requests so many times
SCHEDULERS: Mapping[str, Callable[[], Scheduler]] = {
    "FIFO": FIFOScheduler,
    "sorted": SortedScheduler,
    "sorted, groups apart": partial(SortedScheduler, keep_groups=False),
    "packed": PackedScheduler,
    "longest first": LongestFirstScheduler,
    "HistoPipe, tier 1": partial(HistoPipeScheduler, tier=1),
    "HistoPipe, tier 2": HistoPipeScheduler,
    "paced": PacedScheduler,
    "Seer": SeerScheduler,
    "Laminar's repack": LaminarScheduler,
}
ROWS = [
    *((name, ON_POLICY) for name in SCHEDULERS if name != "Laminar's repack"),
    *((name, ONE_OFF) for name in SCHEDULERS if name != "Seer"),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What a rule has done with a workload, from one seed; times are in passes of an idle engine."""

    tokens_per_time: float
    bound: float  # tokens_per_time that it cannot exceed
    idle: float
    p99: float
    step_time: float
    stale: float
    oldest: int


def main(words: Sequence[str] | None = None) -> dict[str, Any]:
    parser = record.options(__doc__, seeds=3, steps=25)  # or as many as a trace has; the first epoch does not count
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS), metavar="NAME")
    arguments = record.begin(parser, words)
    least = 1 + max(2 * WORKLOADS[name].warm_up for name in arguments.workloads)  # a rule may drop half of the prompts
    if arguments.steps < least or arguments.seeds < 1:
        parser.error(f"--steps {arguments.steps} --seeds {arguments.seeds}: expected at least {least} steps and 1 seed")
    rows: list[dict[str, Any]] = []
    for name in arguments.workloads:
        workload = WORKLOADS[name]
        seeds = range(arguments.seed, arguments.seed + arguments.seeds)
        found = [figures_of_all(workload, workload.steps(arguments.steps + RUN_OUT, seed)) for seed in seeds]
        for rule in ROWS:
            base = [each["FIFO", ON_POLICY] for each in found]
            rows.append({"workload": name, **row(rule, [each[rule] for each in found], base)})
            record.note_row(rows[-1])
    return record.finish("tournament", __doc__, arguments, rows=rows)


def row(rule: tuple[str, str], found: Sequence[Figures], fifo: Sequence[Figures]) -> dict[str, Any]:
    pairs = list(zip(found, fifo, strict=True))

    def mean(values: Sequence[float]) -> float:
        return float(f"{np.mean(values):.3g}")

    return {
        "rule": rule[0],
        "steps": rule[1],
        "tokens": record.spread(each.tokens_per_time / base.tokens_per_time for each, base in pairs),
        "bound": mean([each.bound / base.tokens_per_time for each, base in pairs]),
        "idle": abs(mean([round(each.idle, 6) for each in found])),
        "p99": mean([each.p99 / base.step_time for each, base in pairs]),
        "stale": mean([each.stale for each in found]),
        "oldest": max(each.oldest for each in found),
    }


def figures_of_all(workload: Workload, works: Sequence[StepWork]) -> dict[tuple[str, str], Figures]:
    """Return the figures of every rule on the same lengths."""
    return {(name, steps): figures(SCHEDULERS[name](), steps, workload, works) for name, steps in ROWS}


def figures(scheduler: Scheduler, steps: str, workload: Workload, works: Sequence[StepWork]) -> Figures:
    """Return the figures of a rule that answers what it is asked; the last steps only keep workers busy."""
    window = Window(first=workload.warm_up, last=len(works) - RUN_OUT)
    recomputed = 0.0 if isinstance(scheduler, SeerScheduler) else 1.0  # its workers share keys and values
    decoding = Decoding(max_running=workload.max_running, recomputed=recomputed)
    timeline = Simulation(
        scheduler,
        num_workers=workload.num_workers,
        run_ahead="off" if steps == ON_POLICY else "keep",
        rebalance_every=interval(works),
        decoding=decoding,
    ).run(works)
    found = summary(timeline, window, train_time=0.0)
    kept = slice(window.first, window.last)
    lengths = [work.lengths for work in works[kept]]
    least = least_barrier_time if steps == ON_POLICY else least_time
    return Figures(
        tokens_per_time=found["tokens_per_time"],
        bound=sum(each.sum() for each in lengths) / least(lengths, workload),
        idle=found["bubble_frac"],
        p99=float(np.quantile(np.concatenate(timeline.latencies[kept]), 0.99)),
        step_time=found["step_time"],
        stale=found["stale_token_frac"],
        oldest=int(found["staleness_max"]),
    )


def interval(works: Sequence[StepWork]) -> float:
    """Return the time between two looks of a rule at the workers."""
    return float(np.concatenate([work.lengths for work in works]).mean()) / LOOKS


def least_barrier_time(steps: Sequence[FloatArray], workload: Workload) -> float:
    """Return a time below which no rule samples these tokens, step by step."""
    return sum(max(_alone(tokens), _shared(tokens.sum(), len(tokens), workload)) for tokens in steps)


def least_time(steps: Sequence[FloatArray], workload: Workload) -> float:
    """Return a time below which no rule samples these steps if each may begin when the one before the last is done.

    What is sampled of the first step may be sampled before, so it does not count.
    """
    inner = steps[1:]
    chains = [sum(map(_alone, inner[first::2])) for first in (0, 1)]
    widest = max(len(tokens) for tokens in steps)
    return max(*chains, _shared(sum(tokens.sum() for tokens in inner), 2 * widest, workload))


def _alone(tokens: FloatArray) -> float:
    """Return the time of the longest answer on a worker of its own."""
    return float(tokens.max() * Decoding().pass_cost(np.array(1.0)))


def _shared(tokens: float, num_requests: int, workload: Workload) -> float:
    """Return the time of so many tokens on all workers without bubbles, in passes of as many requests as possible."""
    slots = min(num_requests, workload.max_running or num_requests)
    return float(tokens * Decoding().pass_cost(np.array(float(slots))) / slots / workload.num_workers)


if __name__ == "__main__":
    main()
