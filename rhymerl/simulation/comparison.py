"""`rhymerl simulate`: a scheduler against FIFO with a barrier and FIFO with the same run-ahead, on equal lengths."""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import DictConfig

from rhymerl.config import construct, instantiate
from rhymerl.costs import CostCurve
from rhymerl.errors import ConfigError, require_at_least
from rhymerl.progress import SILENT, ProgressBar, counted
from rhymerl.report.printing import print_table, say
from rhymerl.schedulers.base import Scheduler
from rhymerl.schedulers.fifo import FIFOScheduler
from rhymerl.simulation.base import REFERENCE_COSTS, Decoding, LengthSource, StepWork, Timeline
from rhymerl.simulation.pipeline import Simulation, check_modes
from rhymerl.simulation.summary import Window, summary
from rhymerl.simulation.workload import RecordedLengths

RUN_OUT = 2  # steps beyond the last, so that workers have something to run ahead on until it is done
# Arguments that are settings of the same names.
_OF_PIPELINE = ("run_ahead", "max_staleness", "pipeline", "train_time", "weight_delay", "rebalance_every")
_OF_DECODING = ("max_running", "tokens_per_pass", "verified", "redo_acceptance", "redo_nodes")
_AT_LEAST_1 = ("workers", "steps", "seeds", "rebalance_every", "tokens_per_pass", "gantt_steps", "max_running")
_AT_LEAST_0 = ("warm_up", "train_time", "weight_delay", "redo_nodes")
_COLUMNS = {  # of a table of several
    "speedup_over_fifo": "x FIFO",
    "speedup_over_fifo_barrier": "x barrier",
    "bubble_frac": "idle",
    "run_ahead_frac": "again",
    "migration_rate": "moved",
    "stale_token_frac": "stale",
    "wait_p50": "wait",
    "latency_max": "latency",
}
_SHOWN = {
    "speedup_over_fifo_barrier": "times as fast as FIFO behind a barrier",
    "speedup_over_fifo": "times as fast as FIFO with the same run_ahead",
    "bubble_frac": "share of worker time without work",
    "run_ahead_frac": "share of it spent on tokens that are sampled again",
    "tail_frac": "share of decoding time with at most a quarter of a queue left",
    "migration_rate": "requests moved to another worker",
    "staleness_max": "oldest policy, in steps",
    "stale_token_frac": "tokens sampled by the policy before",
    "wait_p50": "steps from when a step may begin to a request's first token, median",
    "wait_max": "the longest",
    "latency_max": "steps until a request's last token, the longest",
}


def compare(config: DictConfig, *, progress: ProgressBar = SILENT) -> dict[str, Any]:
    """Return what `rhymerl simulate` prints of one scheduler (see configs/simulate.yaml)."""
    name = str(config.scheduler["_target_"]).rpartition(".")[2]
    result = compare_several(config, {name: config.scheduler}, progress=progress)
    del result["fifo"]
    return {**result.pop("schedulers")[name], "scheduler": name, **result}


def compare_several(
    config: DictConfig, schedulers: Mapping[str, Any], *, progress: ProgressBar = SILENT
) -> dict[str, Any]:
    """Return the figures of each scheduler by name, and of FIFO, on the same work.

    They are means over seeds, with the spread of the speed-up.
    """
    check(config)
    source = length_source(config)
    modes = list(dict.fromkeys(("off", config.run_ahead)))  # of FIFO: a barrier, and the configured one
    rows: dict[str, list[dict[str, Any]]] = defaultdict(list)
    fifo_rows: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for number, seed in enumerate(range(config.seed, config.seed + config.seeds), 1):
        works = source.steps(config.steps + RUN_OUT, seed)
        window = window_of(config, len(works))
        words = f"steps with seed {seed}, {number} of {counted(config.seeds, 'seed')}"
        timelines: dict[str, Timeline] = {}  # by scheduler
        fifo_timelines: dict[str, Timeline] = {}  # by mode
        with _no_collection(), progress.during(words, (len(schedulers) + len(modes)) * len(works)):
            for name, node in schedulers.items():
                scheduler = instantiate(node, key="scheduler", kind=Scheduler)
                timelines[name], figures = _figures(config, scheduler, works, window, progress, config.run_ahead)
                rows[name].append(figures)
            for mode in modes:
                scheduler = FIFOScheduler()
                fifo_timelines[mode], figures = _figures(config, scheduler, works, window, progress, mode)
                fifo_rows[mode].append(figures)
        barrier, fifo = (fifo_rows[mode][-1]["step_time"] for mode in ("off", config.run_ahead))
        for each in (*rows.values(), *fifo_rows.values()):
            each[-1] = {
                "speedup_over_fifo_barrier": barrier / each[-1]["step_time"],
                "speedup_over_fifo": fifo / each[-1]["step_time"],
                "fifo_barrier_step_time": barrier,
                **each[-1],
            }
        if seed == config.seed and config.gantt is not None:
            draw_gantt(config, fifo_timelines["off"], timelines, window)
    return {
        "schedulers": {name: _over_seeds(each) for name, each in rows.items()},
        "fifo": {mode: _over_seeds(each) for mode, each in fifo_rows.items()},
        "run_ahead": config.run_ahead,
        "workers": config.workers,
        "steps": window.last - window.first,
        "seeds": config.seeds,
    }


def _over_seeds(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    speedups = [row["speedup_over_fifo_barrier"] for row in rows]
    return {
        **{name: _joined(name, [row[name] for row in rows]) for name in rows[0]},
        "speedup_min": min(speedups),
        "speedup_max": max(speedups),
    }


@contextmanager
def _no_collection() -> Iterator[None]:
    """Suspend Python's cycle collection: a step makes thousands of records without cycles, and it takes a third."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _figures(
    config: DictConfig,
    scheduler: Scheduler,
    works: Sequence[StepWork],
    window: Window,
    progress: ProgressBar,
    run_ahead: str,
) -> tuple[Timeline, dict[str, Any]]:
    simulated = simulation(config, scheduler, run_ahead=run_ahead)
    timeline = simulated.run(works, progress=progress)
    lengths = np.concatenate([work.lengths for work in works[window.first : window.last]])
    return timeline, {
        **summary(timeline, window, train_time=simulated.pause),
        "mean_length": float(lengths.mean()),
        "requests": len(lengths),
        **{name.replace("/", "_"): value for name, value in scheduler.metrics().items()},
    }


def simulation(config: DictConfig, scheduler: Any, **instead: Any) -> Simulation:
    """Return the configured pipeline with a scheduler, and some arguments other than configured."""
    configured: dict[str, Any] = {name: config[name] for name in _OF_PIPELINE}
    configured |= {"num_workers": config.workers, "decoding": _decoding(config)}
    return Simulation(scheduler, **(configured | instead))


def length_source(config: DictConfig) -> LengthSource:
    """Return the trace, or else what `lengths` says."""
    if config.trace is not None:
        settings = {
            "trace": config.trace,
            "prompts_per_step": config.lengths.prompts_per_step,
            "has_seconds": config.costs is not None,
        }
        return construct(RecordedLengths, settings, key="lengths")
    source: LengthSource = instantiate(config.lengths, key="lengths")
    return source


def window_of(config: DictConfig, num_steps: int) -> Window:
    """Return the steps that count. Raises ConfigError when there are none."""
    last = min(config.steps, num_steps)
    if last <= config.warm_up:
        raise ConfigError(f"warm_up={config.warm_up}: expected less than the number of steps, {last}")
    return Window(first=config.warm_up, last=last)


def draw_gantt(config: DictConfig, barrier: Timeline, timelines: Mapping[str, Timeline], window: Window) -> None:
    """The first steps of the window with each scheduler, below those of FIFO behind a barrier."""
    from rhymerl.simulation.gantt import draw

    last = min(window.first + config.gantt_steps, window.last)
    of_schedulers = {f"{name}, run_ahead={config.run_ahead}": timeline for name, timeline in timelines.items()}
    panels = {"FIFOScheduler, run_ahead=off": barrier, **of_schedulers}
    draw(panels, Window(first=window.first, last=last), Path(config.gantt))


def _decoding(config: DictConfig) -> Decoding:
    costs = REFERENCE_COSTS if config.costs is None else construct(CostCurve.read, {"costs": config.costs}, key="")
    return Decoding(costs=costs, **{name: config[name] for name in _OF_DECODING})


def check(config: DictConfig) -> None:
    """Raise ConfigError for settings that are out of range or contradict one another."""
    modes = {name: config[name] for name in ("run_ahead", "max_staleness", "pipeline")}
    construct(check_modes, modes, key="")
    least = dict.fromkeys(_AT_LEAST_1, 1) | dict.fromkeys(_AT_LEAST_0, 0) | {"verified": config.tokens_per_pass}
    limits = {name: (config[name], number) for name, number in least.items() if config[name] is not None}
    require_at_least(limits, error=ConfigError)
    if not 0 <= config.redo_acceptance <= 1:
        raise ConfigError(f"redo_acceptance={config.redo_acceptance}: expected 0 to 1")
    if config.gantt is not None:
        from rhymerl.report.pictures import check_picture

        check_picture("gantt", Path(str(config.gantt)))


def _joined(name: str, values: Sequence[float]) -> float:
    if name.endswith("_max"):
        return max(values)
    return sum(values) if name == "requests" else sum(values) / len(values)


def report(result: Mapping[str, Any]) -> None:
    """Print a table for people."""
    rows = [(name, f"{result[name]:.3g}", meaning) for name, meaning in _SHOWN.items()]
    title = f"{result['scheduler']}, run_ahead={result['run_ahead']}"
    print_table(("figure", "", "meaning"), rows, title=title, left=("figure", "meaning"))
    say(
        f"{counted(result['workers'], 'worker')}, {counted(result['steps'], 'step')}, {counted(result['seeds'], 'seed')}: "
        f"{result['speedup_min']:.3f} to {result['speedup_max']:.3f} times as fast as FIFO behind a barrier"
    )


def report_several(result: Mapping[str, Any]) -> None:
    """Print a table by scheduler for people, below FIFO behind a barrier and with the same run-ahead."""
    same = result["run_ahead"]
    fifo = {"fifo" if mode == same else f"fifo, run_ahead={mode}": each for mode, each in result["fifo"].items()}
    rows = [
        (
            name,
            *(f"{each[column]:.3g}" for column in _COLUMNS),
            f"{each['speedup_min']:.3f} to {each['speedup_max']:.3f}",
        )
        for name, each in (fifo | result["schedulers"]).items()
    ]
    columns = ("scheduler", *_COLUMNS.values(), "x barrier by seed")
    num_shown = len(columns) - (result["seeds"] == 1)
    print_table(columns[:num_shown], [row[:num_shown] for row in rows], title=f"run_ahead={same}", left=columns[:1])
    sizes = [counted(result[f"{name}s"], name) for name in ("worker", "step", "seed")]
    meanings = "; ".join(f"{short}: {_SHOWN[name]}" for name, short in _COLUMNS.items())
    say(f"{', '.join(sizes)}. {meanings}")
