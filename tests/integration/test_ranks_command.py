"""`rhymerl fit` on two ranks: one run directory, one output, exact resume."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rhymerl.algos import GRPO
from tests.integration.conftest import assert_same, checkpoint, rows
from tests.integration.ranked import run_ranks, said, start_ranks
from tests.report.directories import data_of

RANKS = ["trainer.devices=2", "trainer.strategy=ddp", "trainer.accelerator=cpu"]


def main(words: list[str]) -> None:
    from rhymerl.cli import main

    sys.exit(main(words))


def words_for(settings: list[str], run_dir: Path, *more: str) -> list[str]:
    return [*settings, *RANKS, f"run_dir={run_dir}", "record_rollouts=true", *more]


def state(run_dir: Path) -> dict[str, Any]:
    """All of a checkpoint that does not tell the time, and how fast it went."""
    saved = checkpoint(run_dir)
    names = ("num_rollouts", "num_tokens", "history", "budgets", "scheduler", "loop")
    return {
        "weights": saved["state_dict"],
        "optimizer": saved["optimizer_states"],
        **{name: saved["rhymerl"][name] for name in names},
    }


@pytest.mark.slow
def test_the_launcher_starts_the_ranks_and_one_of_them_speaks(settings, tmp_path):
    words = words_for(settings, tmp_path / "run", "trainer.max_steps=4", "scheduler=histopipe", "run_ahead=draft")
    done = subprocess.run(
        [sys.executable, "-m", "rhymerl", *words, "--json"],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["steps"] == 2
    assert json.loads((tmp_path / "run" / "summary.json").read_text()) == result
    assert done.stderr.count("Evaluating on 4 held-out prompts") == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]
    assert len({row["step"] for row in rows(tmp_path / "run" / "samples.jsonl")}) == 1
    (timeline,) = data_of((tmp_path / "run" / "report.html").read_text())["timelines"]
    assert timeline["rows"] == ["rank 0", "rank 1"]
    kinds = {(bar["row"], bar["kind"]) for bar in timeline["bars"]}
    assert {(row, kind) for row in (0, 1) for kind in ("rollout", "update", "weights")} <= kinds


@pytest.mark.parametrize(
    "run_ahead", [*(pytest.param(mode, marks=pytest.mark.slow) for mode in ("off", "draft")), "keep"]
)
def test_a_killed_run_resumes_to_the_very_same_weights(run_ahead, settings, tmp_path):
    slow = ["rollout.max_tokens=64", "backend.max_running=2"]  # many passes, so that ranks meet often
    scheduler = "{_target_: tests.rollout.ranked.RestlessHistoPipe}"
    more = [f"run_ahead={run_ahead}", f"scheduler={scheduler}", *slow]
    run_ranks(2, main, words_for(settings, tmp_path / "whole", *more), output=tmp_path / "output")
    words = words_for(settings, tmp_path / "run", *more)
    # The fourth backward of rank 1 is in the second step, or later where its part was empty.
    dies = "algo={_target_: tests.integration.programs.DieInUpdate, call: 9}"
    processes = start_ranks(2, main, [*words, dies], output=tmp_path / "output")
    for process in processes:
        process.join(600)
        process.kill()
    assert -signal.SIGKILL in [process.exitcode for process in processes], said(tmp_path / "output", 0)
    saved = checkpoint(tmp_path / "run")["rhymerl"]
    assert 0 < saved["num_rollouts"] < 6
    assert (run_ahead == "off") == (not saved["loop"]["ahead"])
    run_ranks(2, main, [*words, "ckpt_path=last"], output=tmp_path / "output")
    assert_same(state(tmp_path / "run"), state(tmp_path / "whole"))
    files = [tmp_path / name / "rollouts.jsonl.gz" for name in ("run", "whole")]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_ctrl_c_on_one_rank_stops_both_after_the_step(settings, tmp_path):
    stops = f"algo={{_target_: tests.integration.programs.DieInUpdate, call: 3, signal: {int(signal.SIGINT)}}}"
    words = words_for(settings, tmp_path / "run", stops)
    processes = start_ranks(2, main, words, output=tmp_path / "output")
    for process in processes:
        process.join(600)
        process.kill()
    assert 130 in [process.exitcode for process in processes], said(tmp_path / "output", 0)
    assert checkpoint(tmp_path / "run")["rhymerl"]["num_rollouts"] < 6


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_told_to_end_either_rank_saves_at_the_end_of_the_step(rank, settings, tmp_path):
    """Lightning would answer SIGTERM in the middle of a step, with a collective that the other rank never comes to."""
    stops = f"algo={{_target_: tests.integration.test_ranks_command.ToldToEnd, rank: {rank}}}"
    words = words_for(settings, tmp_path / "run", stops, "checkpoint.every_n_steps=100")
    processes = start_ranks(2, main, words, output=tmp_path / "output")
    for process in processes:
        process.join(600)
        process.kill()
    codes = [process.exitcode for process in processes]
    # The other ranks' code is no failure, for which a launcher would kill rank 0; and rank 0 knows of no signal to rank
    # 1.
    assert codes == [128 + (signal.SIGTERM if rank == 0 else signal.SIGINT), 0], said(tmp_path / "output", rank)
    assert "Stopping after this step; SIGTERM again stops at once." in said(tmp_path / "output", rank)
    assert checkpoint(tmp_path / "run")["rhymerl"]["num_rollouts"] == 2
    run_ranks(2, main, words_for(settings, tmp_path / "run", "ckpt_path=auto"), output=tmp_path / "output")
    run_ranks(2, main, words_for(settings, tmp_path / "whole"), output=tmp_path / "output")
    assert_same(state(tmp_path / "run"), state(tmp_path / "whole"))


class ToldToEnd(GRPO):
    """One rank is sent SIGTERM when the second step's answers are known."""

    def __init__(self, *, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self._calls = 0

    def prepare(self, batch: Any) -> Any:
        self._calls += 1
        if self._calls == 2 and int(os.environ["LOCAL_RANK"]) == self.rank:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().prepare(batch)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            ["run_ahead=keep", "max_staleness=0"],
            "max_staleness=0: run_ahead=keep trains on tokens of the policy before",
        ),
        (["run_ahead=always"], "run_ahead='always': expected one of off, draft, keep"),
        (["max_staleness=-1"], "max_staleness=-1: expected at least 0"),
        (["trainer.strategy=fsdp"], "FSDP"),
        (["trainer.strategy=ddp_spawn", "trainer.devices=2"], "expected ddp, whose ranks are started as scripts"),
    ],
)
def test_bad_settings_are_refused_in_one_line(more, message, settings, tmp_path, rhymerl):
    done = rhymerl(*settings, "trainer.accelerator=cpu", f"run_dir={tmp_path / 'run'}", *more)
    assert done.code == 2
    assert message in done.err
    assert done.err.count("\n") == 1
