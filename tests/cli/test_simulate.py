"""`rhymerl simulate` as one types it."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rhymerl.cli import main
from tests.documents import reader_in
from tests.products import values_first

TINY = ["workers=4", "steps=12", "seeds=2", "lengths.prompts_per_step=16", "lengths.group_size=4"]
TRACE = Path(__file__).parents[2] / "benchmarks" / "traces" / "running_sum.jsonl.gz"


def run(words: Sequence[object], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = main(["simulate", *map(str, words)])
    return (code, *capsys.readouterr())


def answer(words: Sequence[object], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    code, out, err = run([*words, "--json"], capsys)
    assert code == 0, err
    return json.loads(out)


@pytest.mark.parametrize(
    ("scheduler", "mode"), values_first(["fifo", "sorted", "packed", "histopipe", "paced"], ["off", "draft", "keep"])
)
def test_every_scheduler_in_every_mode(scheduler, mode, capsys):
    result = answer([*TINY, f"scheduler={scheduler}", f"run_ahead={mode}"], capsys)
    assert result["staleness_max"] == (mode == "keep")
    assert 0 <= result["bubble_frac"] < 1
    assert 0 <= result["migration_rate"] < 0.2
    assert result["requests"] == 2 * 7 * 16 * 4
    assert result["speedup_min"] <= result["speedup_over_fifo_barrier"] <= result["speedup_max"]
    if scheduler == "fifo":
        assert result["speedup_over_fifo"] == 1, "running ahead is no merit of a scheduler"
    if mode == "off":
        assert result["speedup_over_fifo"] == result["speedup_over_fifo_barrier"]
    if mode == "keep":
        assert result["speedup_over_fifo_barrier"] > 1
    assert ("sched_length_pred_mae" in result) == (scheduler != "fifo")


def test_waits_make_steps_longer_and_predicting_them_shorter(capsys):
    words = [*TINY, "scheduler=histopipe", "lengths.turns=3"]
    plain, same, waiting = (answer([*words, f"lengths.wait={wait}"], capsys) for wait in (0, 0.0, 2000.0))
    assert plain == same == answer([*TINY, "scheduler=histopipe"], capsys), "without waits turns are nothing"
    assert waiting["mean_length"] == plain["mean_length"]
    assert waiting["fifo_barrier_step_time"] > plain["fifo_barrier_step_time"] + 3 * 2000
    assert waiting["speedup_over_fifo"] > 1
    code, _, err = run([*TINY, "lengths.wait=-1"], capsys)
    assert (code, "lengths.wait=-1" in err) == (2, True)


def test_more_run_ahead_tokens_than_can_be_right_do_no_harm(tmp_path, capsys):
    costs = tmp_path / "costs.json"
    costs.write_text(json.dumps({"costs": [[1, 6.2], [64, 7.5], [256, 14], [512, 22], [1024, 38], [4096, 140]]}))
    words = [*TINY, "scheduler=sorted", f"costs={costs}", "tokens_per_pass=3.5", "verified=4", "lengths.group_size=32"]
    off, few, many = (
        answer([*words, *more], capsys)["speedup_over_fifo_barrier"]
        for more in (["run_ahead=off"], ["run_ahead=draft", "redo_nodes=8"], ["run_ahead=draft", "redo_nodes=128"])
    )
    assert off < 1.02 * few < 1.05 * many


def test_a_table_for_people(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    code, out, err = run([*TINY, "scheduler.tier=1"], capsys)
    assert (code, err) == (0, "")
    assert "HistoPipeScheduler, run_ahead=keep" in out
    assert "times as fast as FIFO behind a barrier" in out
    assert "times as fast as FIFO with the same run_ahead" in out


def test_one_of_a_kind_is_no_plural(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert "4 workers, 7 steps, 1 seed: " in run([*TINY, "seeds=1"], capsys)[1]


def test_recorded_lengths(capsys):
    result = answer([f"trace={TRACE}", "workers=4", "lengths.prompts_per_step=32", "warm_up=2", "seeds=1"], capsys)
    assert result["steps"] > 5
    assert 5 < result["mean_length"] < 100
    assert result["speedup_over_fifo_barrier"] > 1


def test_a_scheduler_of_ones_own(tmp_path, capsys):
    (tmp_path / "mine.py").write_text(
        "from rhymerl import Scheduler\n\n\nclass Mine(Scheduler):\n    def plan(self, requests, num_workers, step):\n"
        "        return [list(requests[worker::num_workers]) for worker in range(num_workers)]\n"
    )
    with reader_in(tmp_path):
        assert answer([*TINY, "scheduler=mine.Mine"], capsys)["scheduler"] == "Mine"


def test_a_chart(tmp_path, capsys):
    path = tmp_path / "charts" / "steps.png"
    answer([*TINY, f"gantt={path}", "gantt_steps=2"], capsys)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_chart_without_matplotlib_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, _, err = run([*TINY, "gantt=steps.png"], capsys)
    assert (code, err) == (2, "error: gantt: drawing charts needs matplotlib: pip install 'rhymerl[plot]'\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["run_ahead=keep", "max_staleness=0"],
            "error: max_staleness=0: run_ahead=keep trains on tokens of the policy before",
        ),
        (["run_ahead=maybe"], "error: run_ahead='maybe': expected one of off, draft, keep"),
        (["pipeline=none"], "error: pipeline='none': expected one of colocated, disaggregated"),
        (["workers=0"], "error: workers=0: expected at least 1"),
        (["seeds=0"], "error: seeds=0: expected at least 1"),
        (["warm_up=12"], "error: warm_up=12: expected less than the number of steps, 12"),
        (["max_running=0"], "error: max_running=0: expected at least 1"),
        (["redo_acceptance=2.0"], "error: redo_acceptance=2.0: expected 0 to 1"),
        (["tokens_per_pass=3.0"], "error: verified=1.0: expected at least 3.0"),
        (["costs=nothing.json"], "error: costs='nothing.json': expected a JSON file"),
        (["trace=nothing.jsonl"], "error: trace 'nothing.jsonl': no such file"),
        (["gantt=steps.pdf"], "error: gantt='steps.pdf': expected a file that ends in .png"),
        (["lengths.cap=0"], "error: lengths.cap=0: expected at least 1"),
        (["scheduler=histopip"], "error: scheduler='histopip': expected one of fifo, histopipe, paced, packed, sorted"),
        (["scheduler.tier=5"], "error: scheduler.tier=5: expected"),
        (["worker=3"], "error: unknown setting worker"),
    ],
)
def test_bad_usage_is_one_line_and_exit_code_2(words, message, capsys):
    code, out, err = run([*TINY, *words], capsys)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(message)
