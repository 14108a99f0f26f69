"""One run a directory, and nothing left of what never ran."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from rhymerl.training.checkpoint import newest_whole
from tests.integration import programs
from tests.integration.conftest import Run, checkpoint
from tests.integration.test_resume import assert_same_runs, words_for


def test_two_trainers_do_not_share_a_directory(settings: list[str], tmp_path: Path, rhymerl: Run) -> None:
    words = [*words_for(settings, tmp_path / "run"), "ckpt_path=auto"]
    process = programs.start([*words, "trainer.max_steps=2000"], tmp_path / "output")
    while not (tmp_path / "run" / "checkpoints" / "last.ckpt").exists():
        time.sleep(0.01)
    for each in (words, ["resume", str(tmp_path / "run")]):
        done = rhymerl(*each)
        assert done.code == 2
        assert done.err.startswith(f"error: run_dir='{tmp_path / 'run'}': in use by process {process.pid} on ")
        assert done.err.count("\n") == 1
    evaluated = rhymerl("evaluate", str(tmp_path / "run"))
    assert evaluated.code == 0, f"reading is no use of it: {evaluated.err}"
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert rhymerl(*words, "trainer.max_steps=1", "data.seed=5").code == 2, "its lock is gone with it"
    steps = checkpoint(tmp_path / "run")["rhymerl"]["num_rollouts"]
    assert rhymerl("resume", str(tmp_path / "run"), f"trainer.max_steps={2 * steps + 2}").code == 0
    assert not (tmp_path / "run" / "run.lock").exists()


def test_many_that_begin_at_once_leave_one_run(settings: list[str], tmp_path: Path, rhymerl: Run) -> None:
    words = [*words_for(settings, tmp_path / "run"), "ckpt_path=auto"]
    processes = [programs.start(words, tmp_path / f"output {number}") for number in range(3)]
    for process in processes:
        process.join(600)
    said = [(tmp_path / f"output {number}").read_text() for number in range(3)]
    for process, words_said in zip(processes, said, strict=True):
        assert process.exitcode == 0 or (process.exitcode == 2 and "in use by" in words_said), words_said
    assert any("Everything is in" in each for each in said)
    assert newest_whole(tmp_path / "run" / "checkpoints")[0] == tmp_path / "run" / "checkpoints" / "step=6.ckpt"
    assert rhymerl(*words_for(settings, tmp_path / "whole")).code == 0
    assert_same_runs(tmp_path / "run", tmp_path / "whole")


@pytest.mark.parametrize(
    "more",
    [
        ["rewards=null", "task=null"],
        ["backend.kv_tokens=8"],
        ["model.init={model_type: nemotron, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, "
         "num_attention_heads: 4, num_key_value_heads: 2, max_position_embeddings: 128}", "model.path=null"],
    ],
    ids=["settings", "lengths", "what the engine cannot run"],
)  # fmt: skip
def test_a_refused_run_leaves_no_directory(more: list[str], settings: list[str], tmp_path: Path, rhymerl: Run) -> None:
    """The last one is found out when the engine is brought up, when the directory is there."""
    done = rhymerl(*settings, f"run_dir={tmp_path / 'runs' / 'mine'}", *more)
    assert done.code != 0
    assert not (tmp_path / "runs").exists()


def test_the_last_line_names_what_is_there(settings: list[str], tmp_path: Path, rhymerl: Run) -> None:
    words = [*settings, "trainer.max_steps=2", "drafter=none", "trainer.limit_val_batches=0"]
    one, two = tmp_path / "one", tmp_path / "two"
    last = rhymerl(*words, f"run_dir={one}", "trainer.logger=false").out.splitlines()[-1]
    assert (
        last
        == f"Everything is in {one}: report.html, summary.json, config.yaml, samples.jsonl, history.rhyme, checkpoints/"
    )
    last = rhymerl(*words, f"run_dir={two}", "record_rollouts=true").out.splitlines()[-1]
    assert "samples.jsonl, rollouts.jsonl.gz, history.rhyme, checkpoints/" in last
    assert last.endswith(f"; curves: tensorboard --logdir {two}")
