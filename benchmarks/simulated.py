"""The simulator beside the emulation: rows of headline.py, and what `rhymerl simulate` says of the same lengths, costs and drafts.

The simulator is given what a run has had: the lengths of its answers, the curve of passes, the update, the weights, and the tokens of a pass, drafted and
emitted, as they were on average. All figures are seconds of a step after the first epoch. It leaves three things out. Two are columns: `free_cpu_s` is
the emulation in which CPU time costs nothing, and in `free_context_s` the context costs nothing either. The third is what is left between that and
`simulated_s`: drafts are as good in each pass and for each request, and workers hear of one another at once.

    python benchmarks/simulated.py [--steps 12] [key=value ...]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import headline
import numpy as np
import record
from virtual import TICK_S, VirtualWorkers

from rhymerl.config import compose, instantiate
from rhymerl.simulation import StepWork
from rhymerl.simulation.judge import simulation
from rhymerl.simulation.summary import Window, step_time

ROWS = [
    headline.BARRIER,
    headline.Row("none", "fifo", "keep"),
    headline.Row("history_tree", "fifo", "off"),
    headline.Row("history_tree", "packed", "keep"),
]
RUN_OUT = 2  # steps at the end that do not count: nothing comes behind them
EXCHANGES = 4  # between two looks of the scheduler, as in lockstep


def simulated_s(row: headline.Row, course: headline.Course, arguments: Any) -> float:
    """Return the seconds of a step by the simulator."""
    first = arguments.epoch_steps
    emitted = statistics.fmean(each["rollout/spec_accept_length"] for each in course.metrics[first:])
    accepted = statistics.fmean(each["rollout/spec_accept_rate"] for each in course.metrics[first:])
    updates = [end - start for start, end in course.updates]
    settings = {
        "scheduler": row.scheduler,
        "run_ahead": f"'{row.run_ahead}'",
        "pipeline": "colocated" if row.run_ahead == "off" else "disaggregated",
        "workers": arguments.workers,
        "max_running": arguments.max_running,
        "train_time": statistics.fmean(updates[first:]),
        "weight_delay": course.weights_s,
        "costs": arguments.emulate,
        "tokens_per_pass": emitted,
        "verified": 1 + (emitted - 1) / accepted if emitted > 1 else 1,
        "rebalance_every": EXCHANGES * VirtualWorkers.ticks_per_exchange * TICK_S,
    }
    config = compose("simulate", [f"{name}={value}" for name, value in settings.items()])
    works = [
        StepWork(requests=requests, lengths=np.array(lengths), is_cut=np.zeros(len(lengths), np.bool_))
        for requests, lengths in zip(course.requests, course.lengths, strict=True)
    ]
    simulated = simulation(config, instantiate(config.scheduler, key="scheduler"))
    return step_time(simulated.run(works), Window(first=first, last=len(works) - RUN_OUT), simulated.pause)


def emulated_s(course: headline.Course, arguments: Any) -> float:
    """Return the seconds of a step by the emulation."""
    first, last = arguments.epoch_steps, len(course.ends) - RUN_OUT
    return (course.ends[last - 1] - course.ends[first - 1]) / (last - first)


def figures(row: headline.Row, arguments: Any, *, free: Any, update_s: float) -> dict[str, Any]:
    """Return the figures of a row; `free` are the options of a device whose context costs nothing."""
    ways = {"emulated_s": (arguments, 1.0), "free_cpu_s": (arguments, 0.0), "free_context_s": (free, 0.0)}
    courses = {
        name: headline.run_row(row, given, update_s=update_s, steps=arguments.steps, cpu=cpu)
        for name, (given, cpu) in ways.items()
    }
    seconds = {name: emulated_s(course, arguments) for name, course in courses.items()}
    seconds["simulated_s"] = simulated_s(row, courses["free_context_s"], arguments)
    over = seconds["simulated_s"] / seconds["emulated_s"]
    return {
        "row": row.name,
        **{name: round(value, 3) for name, value in seconds.items()},
        "simulated_over_emulated": round(over, 3),
    }


def main(words: Sequence[str] | None = None) -> dict[str, Any]:
    parser = headline.options(__doc__)
    parser.set_defaults(steps=headline.QUICK_STEPS)
    arguments = parser.parse_args(words)
    if arguments.steps <= arguments.epoch_steps + RUN_OUT:
        parser.error(f"--steps {arguments.steps}: expected more than --epoch-steps {arguments.epoch_steps} + {RUN_OUT}")
    record.set_threads(arguments.threads or 1)
    start = record.environment()
    given = argparse.Namespace(**vars(arguments))
    given.emulate = headline.device(arguments.emulate)
    update_s = headline.update_seconds(given)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        curve = Path(folder) / "free_context.json"
        curve.write_text(json.dumps({"costs": json.loads(given.emulate.read_text())["costs"]}))
        free = argparse.Namespace(**{**vars(given), "emulate": curve})
        for row in ROWS:
            rows.append(figures(row, given, free=free, update_s=update_s))
            record.note_row(rows[-1])
            print(record.cell(rows[-1]), file=sys.stderr, flush=True)
    return record.finish("simulated", __doc__, arguments, rows=rows, start=start)


if __name__ == "__main__":
    main()
