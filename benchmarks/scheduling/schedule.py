"""Schedulers and run-ahead modes over FIFO behind a barrier, simulated on the reference workload of docs/scheduling.md.

A row is a scheduler in a mode: how many times as fast (median and range over seeds), bubbles, what decoding time is spent on
few requests, moved requests, stale tokens, and the longest wait for a first token, in steps. The rows below `variants` change one
setting. `sensitivity` has one seed a point; its plots and a Gantt chart are written beside the result.

    python -m benchmarks.scheduling.schedule --out FOLDER
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

from benchmarks import record
from rhymerl.config import compose
from rhymerl.simulation import judge

TIER_1, TIER_2 = ("scheduler=histopipe", "scheduler.tier=1"), ("scheduler=histopipe",)
SCHEDULERS: dict[str, tuple[str, ...]] = {
    "fifo": ("scheduler=fifo",),
    "sorted": ("scheduler=sorted",),
    "packed": ("scheduler=packed",),
    "histopipe, tier 1": TIER_1,
    "histopipe, tier 2": TIER_2,
    "paced": ("scheduler=paced",),
}
VARIANTS: dict[str, tuple[str, ...]] = {
    "histopipe, tier 1, no migration": (*TIER_1, "scheduler.migrate=false"),
    "histopipe, tier 2, no migration": (*TIER_2, "scheduler.migrate=false"),
    "histopipe, tier 2, groups split": (*TIER_2, "scheduler.keep_groups=false"),
    "histopipe, tier 2, 0.75 groups a worker": (*TIER_2, "scheduler.groups_per_worker=0.75"),
    "histopipe, tier 2, 0.875 groups a worker": (*TIER_2, "scheduler.groups_per_worker=0.875"),
    "paced, groups split": ("scheduler=paced", "scheduler.keep_groups=false"),
    "paced, all workers": ("scheduler=paced", "scheduler.workers=1.0"),
    "histopipe, tier 2, rank correlation 0.9": (*TIER_2, "lengths.rank_correlation=0.9"),
    "paced, rank correlation 0.9": ("scheduler=paced", "lengths.rank_correlation=0.9"),
    "histopipe, tier 2, at most 64 side by side": (*TIER_2, "max_running=64"),
    "packed, at most 64 side by side": ("scheduler=packed", "max_running=64"),
    "paced, at most 64 side by side": ("scheduler=paced", "max_running=64"),
    "histopipe, tier 2, disaggregated, training 2000": (*TIER_2, "pipeline=disaggregated", "train_time=2000"),
    "paced, disaggregated, training 2000": ("scheduler=paced", "pipeline=disaggregated", "train_time=2000"),
}
SENSITIVITY: dict[str, tuple[str, list[tuple[float, tuple[str, ...]]]]] = {
    "prompts": ("prompts a step", [(n, (f"lengths.prompts_per_step={n}",)) for n in (64, 128, 256, 512, 1024)]),
    "within": ("spread within prompts", [(s, (f"lengths.within={s}",)) for s in (0.1, 0.2, 0.35, 0.5, 0.7)]),
    "between": ("spread between prompts", [(s, (f"lengths.between={s}",)) for s in (0.1, 0.3, 0.5, 0.7, 0.9)]),
    "workers": (
        "workers, 4 prompts each",
        [(n, (f"workers={n}", f"lengths.prompts_per_step={4 * n}")) for n in (8, 32, 128, 512, 1024)],
    ),
}
CURVES = ("packed", "histopipe, tier 1", "histopipe, tier 2", "paced")
NAMES = ("bubble_frac", "tail_frac", "migration_rate", "stale_token_frac", "run_ahead_frac", "wait_max", "latency_max")


def main(words: Sequence[str] | None = None) -> dict[str, Any]:
    parser = record.options(__doc__)
    parser.add_argument("--seeds", type=int, default=5, help="of the rows with run_ahead=keep")
    parser.add_argument("--steps", type=int, default=200, help="of these; the first 5 do not count")
    parser.add_argument("--other-seeds", type=int, default=2, help="of all other rows")
    parser.add_argument("--other-steps", type=int, default=65)
    parser.add_argument("--curve-steps", type=int, default=25, help="of each point of the sensitivity")
    parser.add_argument("--small", action="store_true", help="8 workers and few prompts: to see whether it runs")
    arguments = parser.parse_args(words)
    start = record.environment()
    rows, curves = table(arguments), sensitivity(arguments)
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)
        draw(curves, arguments)
    return record.finish("schedule", __doc__, arguments, rows=rows, start=start, sensitivity=curves)


def table(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    wanted = [
        *((name, words, mode) for mode in ("keep", "draft", "off") for name, words in SCHEDULERS.items()),
        *((name, words, "keep") for name, words in VARIANTS.items()),
    ]
    return [row(name, words, mode, arguments) for name, words, mode in wanted]


def row(name: str, words: Sequence[str], mode: str, arguments: argparse.Namespace) -> dict[str, Any]:
    is_main = mode == "keep" and name in SCHEDULERS
    seeds, steps = (arguments.seeds, arguments.steps) if is_main else (arguments.other_seeds, arguments.other_steps)
    found = [figures([*words, f"run_ahead={mode}"], steps, arguments.seed + seed, arguments) for seed in range(seeds)]
    return {
        "scheduler": name,
        "run_ahead": mode,
        "speedup": record.spread(each["speedup_over_fifo_barrier"] for each in found),
        **{each: float(f"{sum(one[each] for one in found) / seeds:.3g}") for each in NAMES},
        "staleness_max": max(each["staleness_max"] for each in found),
        "steps": f"{seeds} x {steps - 5}",
    }


def figures(words: Sequence[str], steps: int, seed: int, arguments: argparse.Namespace) -> dict[str, Any]:
    small = ["workers=8", "lengths.prompts_per_step=16", "lengths.group_size=4"] if arguments.small else []
    config = compose("simulate", [*small, *words, f"steps={steps}", f"seed={seed}", "seeds=1"])
    return judge.judge(config)


def sensitivity(arguments: argparse.Namespace) -> dict[str, Any]:
    """Speed-ups by setting, its value and scheduler."""
    return {
        setting: {
            str(value): {
                name: float(
                    f"{figures([*SCHEDULERS[name], *words], arguments.curve_steps, arguments.seed, arguments)['speedup_over_fifo_barrier']:.4g}"
                )
                for name in CURVES
            }
            for value, words in points[: 1 if arguments.small else None]
        }
        for setting, (_, points) in SENSITIVITY.items()
    }


def draw(curves: dict[str, Any], arguments: argparse.Namespace) -> None:
    from matplotlib.figure import Figure

    stem = f"{arguments.hardware}_{time.strftime('%Y%m')}"
    figure = Figure(figsize=(11, 7.5), layout="constrained")
    for axis, (setting, points) in zip(figure.subplots(2, 2, sharey=True).flat, curves.items(), strict=True):
        values = [float(value) for value in points]
        for name in CURVES:
            axis.plot(values, [point[name] for point in points.values()], marker="o", label=name)
        axis.axhline(1.0, color="0.6", lw=0.8)
        if setting in ("prompts", "workers"):
            axis.set_xscale("log", base=2)
            axis.set_xticks(values, [f"{value:g}" for value in values])
        axis.set_xlabel(SENSITIVITY[setting][0])
        axis.grid(alpha=0.3)
    figure.supylabel("times as fast as FIFO behind a barrier")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(CURVES), frameon=False)
    figure.savefig(arguments.out / f"schedule_sensitivity_{stem}.png", dpi=100)
    for name in ("histopipe", "paced"):
        path = arguments.out / f"schedule_gantt_{name}_{stem}.png"
        figures([f"scheduler={name}", f"gantt={path}", "warm_up=10"], 16, arguments.seed, arguments)


if __name__ == "__main__":
    main()
