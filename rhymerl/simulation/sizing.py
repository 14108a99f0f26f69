"""`rhymerl simulate gpus=G`: how many of them train and how many answer, with which scheduler, in which mode."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from omegaconf import DictConfig

from rhymerl.errors import ConfigError, require_at_least
from rhymerl.progress import SILENT, ProgressBar, counted
from rhymerl.report.printing import print_table, say
from rhymerl.schedulers import (
    FIFOScheduler,
    HistoPipeScheduler,
    PacedScheduler,
    PackedScheduler,
    Scheduler,
    SortedScheduler,
)
from rhymerl.simulation.base import Pipeline, StepWork
from rhymerl.simulation.comparison import RUN_OUT, check, length_source, simulation, window_of
from rhymerl.simulation.summary import Window, summary
from rhymerl.workers import RunAhead

_SCHEDULERS: Mapping[str, Callable[[], Scheduler]] = {
    "fifo": FIFOScheduler,
    "sorted": SortedScheduler,
    "histopipe": HistoPipeScheduler,
    "packed": PackedScheduler,
    "paced": PacedScheduler,
}
_MODES: Sequence[RunAhead] = ("off", "draft", "keep")  # auto is one of the first two
_PARTS = (1 / 16, 1 / 8, 3 / 16, 1 / 4, 3 / 8, 1 / 2, 5 / 8)  # of the GPUs that train
_SHOWN = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A way to use G GPUs; `trainers` is None where all of them answer and train in turn."""

    scheduler: str
    run_ahead: RunAhead
    trainers: int | None
    workers: int

    @property
    def pipeline(self) -> Pipeline:
        return "colocated" if self.trainers is None else "disaggregated"


BARRIER = ("fifo", "off", None)


def size(config: DictConfig, *, progress: ProgressBar = SILENT) -> dict[str, Any]:
    """Return all ways to use `gpus` GPUs, the fastest first, beside FIFO behind a barrier on all of them.

    `train_time` is what the update takes on all of them; on some it takes as much longer.
    """
    check(config)
    check_gpus(config.gpus, config.gpus_per_worker)
    ways = list(_ways(config.gpus, config.gpus_per_worker))
    works = length_source(config).steps(config.steps + RUN_OUT, config.seed)
    window = window_of(config, len(works))
    with progress.during(counted(len(ways), "way"), len(ways)):
        rows = [_row(config, way, works, window, progress) for way in ways]
    baseline = next(
        row["step_time"] for row in rows if (row["scheduler"], row["run_ahead"], row["trainers"]) == BARRIER
    )
    rows = [{**row, "speedup_over_fifo_barrier": baseline / row["step_time"]} for row in rows]
    rows.sort(key=lambda row: row["step_time"])
    return {"gpus": config.gpus, "steps": window.last - window.first, "rows": rows}


def _ways(gpus: int, gpus_per_worker: int) -> Iterator[Way]:
    for scheduler in _SCHEDULERS:
        for run_ahead in _MODES:
            yield Way(scheduler=scheduler, run_ahead=run_ahead, trainers=None, workers=gpus // gpus_per_worker)
            for trainers in splits(gpus, gpus_per_worker) if run_ahead != "off" else ():
                workers = (gpus - trainers) // gpus_per_worker
                yield Way(scheduler=scheduler, run_ahead=run_ahead, trainers=trainers, workers=workers)


def splits(gpus: int, gpus_per_worker: int) -> list[int]:
    """Return numbers of GPUs that may train, ascending: whole workers are left of the others."""
    units = gpus // gpus_per_worker
    rest = gpus - units * gpus_per_worker
    wanted = {max(round(part * units), 1) for part in _PARTS}
    return sorted(rest + each * gpus_per_worker for each in wanted if each < units)


def _row(
    config: DictConfig, way: Way, works: Sequence[StepWork], window: Window, progress: ProgressBar
) -> dict[str, Any]:
    train_time = config.train_time * config.gpus / (way.trainers or config.gpus)
    simulated = simulation(
        config,
        _SCHEDULERS[way.scheduler](),
        num_workers=way.workers,
        run_ahead=way.run_ahead,
        pipeline=way.pipeline,
        train_time=train_time,
    )
    figures = summary(simulated.run(works), window, train_time=simulated.pause)
    progress.advance()
    names = ("step_time", "bubble_frac", "run_ahead_frac", "stale_token_frac", "staleness_max")
    return {
        **asdict(way),
        "pipeline": way.pipeline,
        "trainer_idle_frac": None if way.trainers is None else max(1 - train_time / figures["step_time"], 0.0),
        **{name: figures[name] for name in names},
    }


def report(result: Mapping[str, Any]) -> None:
    """Print a table of the fastest ways for people, and the fastest of each mode that is not among them."""
    rows = list(result["rows"])
    best = [next(row for row in rows if row["run_ahead"] == mode) for mode in _MODES]
    shown = [row for number, row in enumerate(rows) if number < _SHOWN or row in best]
    title = f"{result['gpus']} GPUs, {counted(result['steps'], 'step')}"
    names = ("scheduler", "run_ahead", "train", "answer", "x FIFO barrier", "idle", "again", "stale")
    print_table(names, map(_cells, shown), title=title, left=names[:2])
    say(
        "train: GPUs that train alone, all = workers stop for the update; answer: workers; idle: share of their time without work; "
        "again: on tokens that are sampled again; stale: tokens of the policy before"
    )


def _cells(row: Mapping[str, Any]) -> list[str]:
    return [
        row["scheduler"],
        row["run_ahead"],
        "all" if row["trainers"] is None else str(row["trainers"]),
        f"{row['workers']}",
        f"{row['speedup_over_fifo_barrier']:.2f}",
        f"{max(row['bubble_frac'], 0.0):.0%}",
        f"{row['run_ahead_frac']:.0%}",
        f"{row['stale_token_frac']:.0%}",
    ]


def check_gpus(gpus: int, gpus_per_worker: int) -> None:
    """Raise ConfigError where a worker and as many trainers do not fit."""
    require_at_least({"gpus_per_worker": (gpus_per_worker, 1)}, error=ConfigError)
    require_at_least({"gpus": (gpus, 2 * gpus_per_worker)}, error=ConfigError)
