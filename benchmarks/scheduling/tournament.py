"""Schedulers of this package and rules of other systems, simulated on the same lengths: speed, bias, staleness.

Rows by workload (workloads.py) and rule (peers/ has those of other systems, and what each leaves out). `steps` says
what a rule may do: all answers by the newest policy, behind a barrier; one step off, `run_ahead=keep`; or end a step
early, which changes what is trained on. Training takes no time, a pass over B requests costs 1 + B / 128, and all of a
worker's requests run side by side unless the workload has slots.

tokens, answers   trained on in a unit of time, over FIFO behind a barrier (median and range over seeds)
bound             the same without bubbles in full batches, or if every longest answer ran alone, whichever is less;
                  of an early-stopping rule, for what it trained on
idle              share of worker time without work
p99               time until an answer's last token, from when it could begin, 99th percentile,
                  in steps of FIFO behind a barrier
bias              mean length of what was trained on over that of what was asked for, over the run
bias of steps     the lowest and highest mean of a step over that of the run: FIFO's comes from the prompts of a step
stale, oldest     share of tokens that an older policy sampled; how old, in steps
answered          answers that were trained on, over those asked for

    python -m benchmarks.scheduling.tournament --out FOLDER
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks import record
from benchmarks.scheduling.early_stop import EarlyStopSimulation
from benchmarks.scheduling.peers.april import APRILScheduler
from benchmarks.scheduling.peers.laminar import LaminarScheduler
from benchmarks.scheduling.peers.longest_first import LongestFirstScheduler
from benchmarks.scheduling.peers.rollpacker import RollPackerScheduler
from benchmarks.scheduling.peers.seer import SeerScheduler
from benchmarks.scheduling.workloads import OVER, WORKLOADS, Workload, plain
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

ON_POLICY, ONE_OFF, EARLY = "on-policy", "one step off", "ends early"
LOOKS = 10  # in the time that an answer of mean length takes, a rule may move requests so many times
SCHEDULERS: Mapping[str, Callable[[Workload], Scheduler]] = {
    "FIFO": lambda workload: FIFOScheduler(),
    "sorted": lambda workload: SortedScheduler(),
    "sorted, groups apart": lambda workload: SortedScheduler(keep_groups=False),
    "packed": lambda workload: PackedScheduler(),
    "longest first": lambda workload: LongestFirstScheduler(),
    "HistoPipe, tier 1": lambda workload: HistoPipeScheduler(tier=1),
    "HistoPipe, tier 2": lambda workload: HistoPipeScheduler(),
    "paced": lambda workload: PacedScheduler(),
    "Seer": lambda workload: SeerScheduler(),
    "Laminar's repack": lambda workload: LaminarScheduler(),
}
EARLY_SCHEDULERS: Mapping[str, Callable[[Workload], Any]] = {
    "RollPacker": lambda w: RollPackerScheduler(prompts=w.prompts, group_size=w.group_size, over=OVER),
    "APRIL": lambda w: APRILScheduler(prompts=w.prompts, group_size=w.group_size),
    "APRIL, dropping": lambda w: APRILScheduler(prompts=w.prompts, group_size=w.group_size, recycle=False),
}
ROWS = [
    *((name, ON_POLICY) for name in SCHEDULERS if name != "Laminar's repack"),
    *((name, ONE_OFF) for name in SCHEDULERS if name != "Seer"),
    *((name, EARLY) for name in EARLY_SCHEDULERS),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What a rule has done with a workload, from one seed; times are in passes of an idle engine."""

    tokens_per_time: float
    answers_per_time: float
    bound: float  # tokens_per_time that it cannot exceed
    idle: float
    p99: float
    step_time: float
    trained: Sequence[Sequence[int]]  # [S][A] lengths
    asked: float  # mean length of what was asked for
    answered: float
    stale: float
    oldest: int

    @property
    def bias(self) -> float:
        return float(np.concatenate(self.trained).mean()) / self.asked

    @property
    def step_biases(self) -> tuple[float, float]:
        """The lowest and the highest."""
        means = [np.mean(lengths) for lengths in self.trained]
        return float(min(means)) / self.asked, float(max(means)) / self.asked


def main(words: Sequence[str] | None = None) -> dict[str, Any]:
    parser = record.options(__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--steps", type=int, default=25, help="or as many as a trace has; the first epoch does not count"
    )
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS), metavar="NAME")
    arguments = parser.parse_args(words)
    least = 1 + max(2 * WORKLOADS[name].warm_up for name in arguments.workloads)  # a rule may drop half of the prompts
    if arguments.steps < least or arguments.seeds < 1:
        parser.error(f"--steps {arguments.steps} --seeds {arguments.seeds}: expected at least {least} steps and 1 seed")
    start = record.environment()
    rows: list[dict[str, Any]] = []
    for name in arguments.workloads:
        workload = WORKLOADS[name]
        seeds = range(arguments.seed, arguments.seed + arguments.seeds)
        found = [figures_of_all(workload, workload.steps(arguments.steps + RUN_OUT, seed)) for seed in seeds]
        for rule in ROWS:
            base = [each["FIFO", ON_POLICY] for each in found]
            rows.append({"workload": name, **row(rule, [each[rule] for each in found], base)})
            record.note_row(rows[-1])
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)
        draw(rows, arguments.out / f"tournament_{arguments.hardware}_{time.strftime('%Y%m')}.png")
    return record.finish("tournament", __doc__, arguments, rows=rows, start=start)


def row(rule: tuple[str, str], found: Sequence[Figures], fifo: Sequence[Figures]) -> dict[str, Any]:
    pairs = list(zip(found, fifo, strict=True))

    def mean(values: Sequence[float]) -> float:
        return float(f"{np.mean(values):.3g}")

    return {
        "rule": rule[0],
        "steps": rule[1],
        "tokens": record.spread(each.tokens_per_time / base.tokens_per_time for each, base in pairs),
        "answers": mean([each.answers_per_time / base.answers_per_time for each, base in pairs]),
        "bound": mean([each.bound / base.tokens_per_time for each, base in pairs]),
        "idle": abs(mean([round(each.idle, 6) for each in found])),
        "p99": mean([each.p99 / base.step_time for each, base in pairs]),
        "bias": record.spread(each.bias for each in found),
        "bias of steps": [
            float(f"{min(each.step_biases[0] for each in found):.3g}"),
            float(f"{max(each.step_biases[1] for each in found):.3g}"),
        ],
        "stale": mean([each.stale for each in found]),
        "oldest": max(each.oldest for each in found),
        "answered": mean([each.answered for each in found]),
    }


def figures_of_all(workload: Workload, works: Sequence[StepWork]) -> dict[tuple[str, str], Figures]:
    """Return the figures of every rule on the same lengths."""
    asked = [plain(work, workload.group_size) for work in works]
    found = {}
    for name, steps in ROWS:
        if steps == EARLY:
            found[name, steps] = early_figures(EARLY_SCHEDULERS[name](workload), workload, works)
        else:
            found[name, steps] = figures(SCHEDULERS[name](workload), steps, workload, asked)
    return found


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
    begin, end = window.bounds(timeline)
    kept = slice(window.first, window.last)
    done = zip(works[: window.last], timeline.latencies, strict=False)
    trained = [work.lengths[np.isfinite(latencies)] for work, latencies in done]
    lengths = [work.lengths for work in works[kept]]
    least = least_barrier_time if steps == ON_POLICY else least_time
    asked = np.concatenate([work.lengths for work in works[: window.last]])
    return Figures(
        tokens_per_time=found["tokens_per_time"],
        answers_per_time=sum(map(len, trained[kept])) / (end - begin),
        bound=sum(each.sum() for each in lengths) / least(lengths, workload),
        idle=found["bubble_frac"],
        p99=float(np.quantile(np.concatenate(timeline.latencies[kept]), 0.99)),
        step_time=found["step_time"],
        trained=trained,
        asked=float(asked.mean()),
        answered=sum(map(len, trained)) / len(asked),
        stale=found["stale_token_frac"],
        oldest=int(found["staleness_max"]),
    )


def early_figures(scheduler: Any, workload: Workload, works: Sequence[StepWork]) -> Figures:
    """Return the figures of a rule that ends steps early, over the same prompts in as many steps as it takes."""
    decoding = Decoding(max_running=workload.max_running)
    simulation = EarlyStopSimulation(
        scheduler, works, num_workers=workload.num_workers, decoding=decoding, every=interval(works)
    )
    steps = simulation.run()
    kept = steps[workload.warm_up :]
    answers = [answer for step in kept for answer in step.answers]
    lasting = kept[-1].end - kept[0].start
    tokens = sum(answer.length for answer in answers)
    left = [np.array([answer.length - answer.stale for answer in step.answers]) for step in kept]
    num_trained = sum(len(step.answers) for step in steps)
    return Figures(
        tokens_per_time=tokens / lasting,
        answers_per_time=len(answers) / lasting,
        bound=tokens / least_barrier_time(left, workload, num_asked=max(step.num_asked for step in kept)),
        idle=1 - sum(step.busy for step in kept) / (workload.num_workers * lasting),
        p99=float(np.quantile([answer.latency for answer in answers], 0.99)),
        step_time=lasting / len(kept),
        trained=[[answer.length for answer in step.answers] for step in steps],
        asked=float(np.mean(simulation.asked)),
        answered=num_trained / len(simulation.asked),
        stale=sum(answer.stale for answer in answers) / tokens,
        oldest=max(answer.age for answer in answers),
    )


def interval(works: Sequence[StepWork]) -> float:
    """Return the time between two looks of a rule at the workers."""
    return float(np.concatenate([work.lengths for work in works]).mean()) / LOOKS


def least_barrier_time(steps: Sequence[FloatArray], workload: Workload, *, num_asked: int = 0) -> float:
    """Return a time below which no rule samples these tokens, step by step."""
    return sum(max(_alone(tokens), _shared(tokens.sum(), len(tokens), workload, num_asked)) for tokens in steps)


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


def _shared(tokens: float, num_requests: int, workload: Workload, num_asked: int = 0) -> float:
    """Return the time of so many tokens on all workers without bubbles, in passes of as many requests as possible."""
    slots = max(num_requests, num_asked)
    if workload.max_running is not None:
        slots = min(slots, workload.max_running)
    return float(tokens * Decoding().pass_cost(np.array(float(slots))) / slots / workload.num_workers)


def draw(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw a panel a workload: bars of tokens, with bounds as ticks, and the bias where there is one."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    colours = {ON_POLICY: "#3b6fb6", ONE_OFF: "#4c9f70", EARLY: "#e08a3c"}
    names = list(dict.fromkeys(row["workload"] for row in rows))
    columns = min(len(names), 4)
    lines = -(-len(names) // columns)
    figure = Figure(figsize=(2.2 + 3.2 * columns, 0.9 + 4.6 * lines), layout="constrained")
    axes = figure.subplots(lines, columns, sharey=True, squeeze=False)
    for axis in axes.flat[len(names) :]:
        axis.set_visible(False)
    for axis, name in zip(axes.flat, names, strict=False):
        shown = [row for row in rows if row["workload"] == name]
        widths = [row["tokens"]["median"] for row in shown]
        errors = [[abs(row["tokens"][end] - row["tokens"]["median"]) for row in shown] for end in ("min", "max")]
        axis.barh(
            range(len(shown)), widths, xerr=errors, color=[colours[row["steps"]] for row in shown], error_kw={"lw": 0.8}
        )
        axis.plot([row["bound"] for row in shown], range(len(shown)), "|", color="0.2", markersize=9)
        for number, row in enumerate(shown):
            if abs(row["bias"]["median"] - 1) > 0.005:
                right = max(row["bound"], row["tokens"]["max"])
                axis.text(right, number, f"  lengths x {row['bias']['median']:.2f}", va="center", fontsize=7)
        axis.set_xlim(0, 1.35 * max(row["bound"] for row in shown))
        axis.set_title(name, loc="left", fontsize=10)
        axis.set_yticks(range(len(shown)), [row["rule"] for row in shown], fontsize=8)
        axis.axvline(1.0, color="0.5", lw=0.8)
        axis.set_ylim(len(shown) - 0.5, -0.5)
    figure.supxlabel(
        "simulated: tokens trained on in a unit of time, over FIFO behind a barrier; | is the bound", fontsize=9
    )
    handles = [Patch(color=colour, label=steps) for steps, colour in colours.items()]
    figure.legend(handles=handles, loc="outside upper center", ncols=3, frameon=False, fontsize=9)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
