"""The README's table has the figures of the files in benchmarks/results/, rounded and nothing else."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from tests.documents import README, ROOT, table_after

RESULTS = ROOT / "benchmarks" / "results"
PAIRS = ("epyc-2core", "epyc-2core-smollm2", "epyc-2core-smollm2-sums")  # of whole runs, by what they train


def rows_of(theme: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((RESULTS / f"{theme}_202611.json").read_text())["rows"]
    return rows


def only(rows: list[dict[str, Any]], **wanted: Any) -> dict[str, Any]:
    (found,) = [row for row in rows if wanted.items() <= row.items()]
    return found


def ratios(values: Sequence[float]) -> str:
    return " / ".join(f"{value:.1f}" for value in values)


# -- measured ----------------------------------------------------------------------------------------------------------


def of_pairs(column: str) -> str:
    """The three whole runs: the quickstart, and SmolLM2 that adds two and eleven numbers."""
    values = [only(rows_of(f"paired_runs_{theme}"), pair="all")[column] for theme in PAIRS]
    return ", ".join(f"{value:.2f}" for value in values)


def by_running_requests() -> str:
    rows = rows_of("rollout_speed_epyc-2core")
    return ratios(
        [only(rows, drafter="history_tree", concurrency=running)["speedup"] for running in (1, 8, 32, 128)],
    )


def gpu_rows(part: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (RESULTS / "gpu_h200.jsonl").read_text().splitlines()]
    return [line["row"] for line in lines if line["part"] == part and "row" in line]


def speed(part: str, mode: str, running: int) -> list[float]:
    """Tokens a second of a part's rows, the warm-up before the others."""
    return [row["tokens_per_s"] for row in gpu_rows(part) if row["mode"] == mode and row["running"] == running]


def in_the_embedded_engine() -> str:
    return ratios(
        [speed("drafts", "history_tree", running)[-1] / speed("drafts", "none", running)[-1] for running in (8, 32)]
    )


def in_sglang(with_history: dict[int, float]) -> str:
    """Speed-ups at 8, 32 and 128; plain decoding of 32 differed so much between rounds that both are told."""
    plain = {running: speed("table-0.5B", "none", running) for running in (8, 32, 128)}
    low, high = sorted(with_history[32] / each for each in plain[32])
    return f"{with_history[8] / plain[8][-1]:.1f} / {low:.1f} to {high:.1f} / {with_history[128] / plain[128][-1]:.1f}"


def without_prompt_graphs() -> str:
    return in_sglang({running: speed("table-0.5B", "history_tree", running)[-1] for running in (8, 32, 128)})


def with_prompt_graphs() -> str:
    lines = (RESULTS / "sglang_passes_h200_202611.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if "tokens_per_s" in row and row["round"] == 1]
    return in_sglang({row["running"]: row["tokens_per_s"] for row in rows})


# -- emulated, simulated -----------------------------------------------------------------------------------------------


def emulated(drafter: str, scheduler: str, run_ahead: str, pipeline: str = "disaggregated") -> dict[str, Any]:
    rows = [row for row in rows_of("headline_xeon-2core") if "one width" not in row["row"]]
    return only(rows, drafter=drafter, scheduler=scheduler, run_ahead=run_ahead, pipeline=pipeline)


def emulated_rollouts() -> str:
    """Six GPUs in turn: the time of a run without its updates, with drafts from history and with none."""
    plain, drafted = (
        (1 - row["update_frac"]) / row["over_barrier"]
        for row in (emulated(drafter, "fifo", "off", "colocated") for drafter in ("none", "history_tree"))
    )
    return f"{plain / drafted:.1f}"


def emulated_steps(scheduler: str, run_ahead: str, pipeline: str = "disaggregated") -> str:
    return f"{emulated('history_tree', scheduler, run_ahead, pipeline)['over_colocated']:.1f}"


def simulated(scheduler: str, run_ahead: str) -> str:
    row = only(rows_of("schedule_xeon-2core"), scheduler=scheduler, run_ahead=run_ahead)
    return f"{row['speedup']['median']:.1f}"


# -- the pages ---------------------------------------------------------------------------------------------------------


RUNS = "quickstart, SmolLM2-135M adding two numbers, adding eleven; two CPU cores"
TABLE = [
    [f"{of_pairs('had')}: {RUNS}", emulated_rollouts(), ""],
    [f"{of_pairs('step')} of these", emulated_steps("fifo", "off", "colocated"), ""],
    [f"{by_running_requests()} at 1 / 8 / 32 / 128", "", ""],
    [f"{in_the_embedded_engine()} at 8 / 32", "", ""],
    [
        f"**{without_prompt_graphs()}** at 8 / 32 / 128; with CUDA graphs for prompts {with_prompt_graphs()}",
        *("", ""),
    ],
    ["not measured", emulated_steps("sorted", "draft"), ""],
    ["not measured", emulated_steps("sorted", "keep"), ""],
    ["not measured", "", simulated("sorted", "draft")],
    ["not measured", "", simulated("paced", "keep")],
]


@pytest.mark.parametrize("number", range(len(TABLE)))
def test_a_row_of_the_readme_is_that_of_its_file(number: int) -> None:
    shown = table_after(README, "## What it brings")
    assert len(shown) == len(TABLE)
    assert shown[number][1:] == TABLE[number]


def test_what_the_quickstart_learns_is_in_its_file() -> None:
    row = only(rows_of("first_runs_epyc-2core"), config="quickstart")
    said = (ROOT / "docs" / "first_runs.md").read_text()
    assert f"rises from {row['before']:.2f} to {row['after']:.2f} within {row['steps']} steps" in said


def test_how_far_the_estimated_speedup_was_off() -> None:
    quickstart, *smollm2 = (
        max(abs(row["off"]) for row in rows_of(f"paired_runs_{theme}") if row["pair"] != "all") for theme in PAIRS
    )
    said = " ".join((ROOT / "docs" / "drafting_measurements.md").read_text().split())
    assert f"it was off by at most {100 * max(smollm2):.0f} %," in said
    assert f"of the quickstart by at most {100 * quickstart:.0f} %" in said
