"""`rhymerl simulate`: a scheduler against FIFO with a barrier and FIFO with the same run-ahead, on equal lengths."""

from __future__ import annotations

import gc
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
from rhymerl.simulation.summary import Window, step_time, summary
from rhymerl.simulation.workload import RecordedLengths

RUN_OUT = 2  # steps beyond the last, so that workers have something to run ahead on until it is done
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
    """Return what `rhymerl simulate` prints (see configs/simulate.yaml): means over seeds, and the spread."""
    check(config)
    source = length_source(config)
    rows: list[dict[str, Any]] = []
    for seed in range(config.seed, config.seed + config.seeds):
        works = source.steps(config.steps + RUN_OUT, seed)
        window = window_of(config, len(works))
        words = f"steps with seed {seed}, {len(rows) + 1} of {counted(config.seeds, 'seed')}"
        runs = 1 + len(_baseline_modes(config))  # with the scheduler, too
        with _no_collection(), progress.during(words, runs * len(works)):
            timeline, row = _compared(config, works, window, progress=progress)
        rows.append(row)
        if seed == config.seed and config.gantt is not None:
            draw_gantt(config, works, timeline, window)
    speedups = [row["speedup_over_fifo_barrier"] for row in rows]
    return {
        **{name: _joined(name, [row[name] for row in rows]) for name in rows[0]},
        "speedup_min": min(speedups),
        "speedup_max": max(speedups),
        "scheduler": str(config.scheduler["_target_"]).rpartition(".")[2],
        "run_ahead": config.run_ahead,
        "workers": config.workers,
        "steps": window.last - window.first,
        "seeds": config.seeds,
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


def _compared(
    config: DictConfig, works: Sequence[StepWork], window: Window, *, progress: ProgressBar = SILENT
) -> tuple[Timeline, dict[str, Any]]:
    """Return the timeline of the configured scheduler, and its figures beside the baseline's on the same work."""
    scheduler = instantiate(config.scheduler, key="scheduler", kind=Scheduler)
    simulated = simulation(config, scheduler)
    timeline, pause = simulated.run(works, progress=progress), simulated.pause
    figures = summary(timeline, window, train_time=pause)
    fifo = {
        mode: step_time(
            simulation(config, FIFOScheduler(), run_ahead=mode).run(works, progress=progress), window, pause
        )
        for mode in _baseline_modes(config)
    }
    lengths = np.concatenate([work.lengths for work in works[window.first : window.last]])
    return timeline, {
        "speedup_over_fifo_barrier": fifo["off"] / figures["step_time"],
        "speedup_over_fifo": fifo[config.run_ahead] / figures["step_time"],
        **figures,
        "fifo_barrier_step_time": fifo["off"],
        "mean_length": float(lengths.mean()),
        "requests": len(lengths),
        **{name.replace("/", "_"): value for name, value in scheduler.metrics().items()},
    }


def _baseline_modes(config: DictConfig) -> list[str]:
    """Return the modes of run_ahead in which FIFO is simulated, each once: a barrier, and the configured one."""
    return list(dict.fromkeys(("off", config.run_ahead)))


def simulation(config: DictConfig, scheduler: Any, **instead: Any) -> Simulation:
    """Return the configured pipeline with a scheduler, and some arguments other than configured."""
    configured: dict[str, Any] = {
        "num_workers": config.workers,
        "run_ahead": config.run_ahead,
        "max_staleness": config.max_staleness,
        "pipeline": config.pipeline,
        "train_time": config.train_time,
        "weight_delay": config.weight_delay,
        "rebalance_every": config.rebalance_every,
        "decoding": _decoding(config),
    }
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


def draw_gantt(config: DictConfig, works: Sequence[StepWork], timeline: Timeline, window: Window) -> None:
    """The first steps of the window, below those of FIFO behind a barrier."""
    from rhymerl.simulation.gantt import draw

    last = min(window.first + config.gantt_steps, window.last)
    barrier = simulation(config, FIFOScheduler(), run_ahead="off").run(works[:last])
    name = str(config.scheduler["_target_"]).rpartition(".")[2]
    panels = {"FIFOScheduler, run_ahead=off": barrier, f"{name}, run_ahead={config.run_ahead}": timeline}
    draw(panels, Window(first=window.first, last=last), Path(config.gantt))


def _decoding(config: DictConfig) -> Decoding:
    costs = REFERENCE_COSTS if config.costs is None else construct(CostCurve.read, {"costs": config.costs}, key="")
    return Decoding(
        costs=costs,
        max_running=config.max_running,
        tokens_per_pass=config.tokens_per_pass,
        verified=config.verified,
        redo_acceptance=config.redo_acceptance,
        redo_nodes=config.redo_nodes,
    )


def check(config: DictConfig) -> None:
    """Raise ConfigError for settings that are out of range or contradict one another."""
    modes = {name: config[name] for name in ("run_ahead", "max_staleness", "pipeline")}
    construct(check_modes, modes, key="")
    limits = {
        "workers": (config.workers, 1),
        "steps": (config.steps, 1),
        "warm_up": (config.warm_up, 0),
        "seeds": (config.seeds, 1),
        "train_time": (config.train_time, 0),
        "weight_delay": (config.weight_delay, 0),
        "rebalance_every": (config.rebalance_every, 1),
        "tokens_per_pass": (config.tokens_per_pass, 1),
        "verified": (config.verified, config.tokens_per_pass),
        "redo_nodes": (config.redo_nodes, 0),
        "gantt_steps": (config.gantt_steps, 1),
    }
    if config.max_running is not None:
        limits["max_running"] = (config.max_running, 1)
    require_at_least(limits, error=ConfigError)
    if not 0 <= config.redo_acceptance <= 1:
        raise ConfigError(f"redo_acceptance={config.redo_acceptance}: expected 0 to 1")
    if config.gantt is not None:
        from rhymerl.simulation.gantt import check_path

        check_path(Path(config.gantt))


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
