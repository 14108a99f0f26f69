"""A run that is killed at any instant, or stopped, and resumed is the run that was never interrupted."""

from __future__ import annotations

import json
import os
import pty
import random
import select
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from rhymerl.callbacks import AtomicCheckpointIO
from tests.integration import programs
from tests.integration.conftest import Run, assert_same, checkpoint, made_once, rows

TABLE = "trainer.callbacks=[{{_target_: rhymerl.callbacks.SampleTable, path: {}, every_n_steps: 1, num_samples: 99}}]"


def words_for(settings: list[str], run_dir: Path) -> list[str]:
    return [*settings, f"run_dir={run_dir}", "record_rollouts=true", TABLE.format(run_dir / "all.jsonl")]


@pytest.fixture
def whole(whole_dir: Path, settings: list[str], rhymerl: Run) -> Path:
    """The run directory of the uninterrupted run; made once."""
    return made_once(whole_dir, words_for(settings, whole_dir), rhymerl)


def state(run_dir: Path) -> dict[str, Any]:
    """All of the last checkpoint that follows neither the clock nor how much was drafted."""
    saved = checkpoint(run_dir)
    summary = saved["callbacks"]["Summary"]
    del summary["seconds"], summary["acceptance"], summary["speedup"]
    saved["callbacks"].pop("RecordSteps", None)  # the length of a file that tells the time
    del saved["callbacks"]["_RunConfig"], saved["loops"], saved["hyper_parameters"], saved["rhymerl"]["logged"]
    del saved["epoch"]  # follows the moment of saving, before or after the end of the epoch; nothing reads it
    return saved


def answers(run_dir: Path) -> list[dict[str, Any]]:
    """The answers of a run, without the time that an environment took."""
    found = rows(run_dir / "all.jsonl")
    for row in found:
        for turn in row.get("turns", ()):
            del turn["waited_s"]
    return found


def assert_same_runs(run_dir: Path, whole: Path) -> None:
    assert_same(state(run_dir), state(whole))
    assert answers(run_dir) == answers(whole)
    assert (run_dir / "rollouts.jsonl.gz").read_bytes() == (whole / "rollouts.jsonl.gz").read_bytes()
    assert {row["step"] for row in answers(run_dir)} == set(range(1, 7))
    one, two = (json.loads((each / "summary.json").read_text()) for each in (run_dir, whole))
    timeless = [name for name in two if not name.endswith("_s") and "spec_" not in name and "speedup" not in name]
    assert {name: one[name] for name in timeless} == {name: two[name] for name in timeless}


def killed(words: list[str], tmp_path: Path, *, when: Path | None = None, after_s: float = 0.0) -> None:
    """Run until it is dead: by its own hand, or by ours, `after_s` after the file `when` has appeared."""
    process = programs.start(words, tmp_path / "output")
    while when is not None and not when.exists() and process.is_alive():
        time.sleep(0.002)
    if when is not None:
        time.sleep(after_s)
        process.kill()
    process.join(600)
    assert process.exitcode == -signal.SIGKILL, (tmp_path / "output").read_text()


@pytest.mark.parametrize(
    "killer",
    [
        [
            "algo={_target_: tests.integration.programs.DieInUpdate, call: 4}"
        ],  # the second mini-batch of the second step
        # In the first step of the second pass, when step 3 has been logged but not saved.
        ["algo={_target_: tests.integration.programs.DieInUpdate, call: 7}", "checkpoint.every_n_steps=2"],
        ["drafter={_target_: tests.integration.programs.DieInRollout, call: 60}"],
    ],
)
def test_killed_in_the_middle_of_a_step(killer, settings, whole, tmp_path, rhymerl):
    words = words_for(settings, tmp_path / "run")
    killed([*words, *killer], tmp_path)
    steps = checkpoint(tmp_path / "run")["rhymerl"]["num_rollouts"]
    assert 0 < steps < 6
    assert rhymerl(*words, "ckpt_path=last").code == 0
    assert_same_runs(tmp_path / "run", whole)


@pytest.mark.slow  # as the chain of kills in test_resume_evaluations.py
@pytest.mark.parametrize("seed", [0, 1])
def test_killed_at_any_instant(seed, settings, whole, tmp_path, rhymerl):
    words = words_for(settings, tmp_path / "run")
    after_s = random.Random(seed).uniform(0, 0.3)
    killed(words, tmp_path, when=tmp_path / "run" / "checkpoints" / "last.ckpt", after_s=after_s)
    assert rhymerl(*words, "ckpt_path=last").code == 0
    assert_same_runs(tmp_path / "run", whole)


@pytest.mark.parametrize("kill", [pytest.param(signal.SIGKILL, marks=pytest.mark.slow), signal.SIGINT])
def test_stopped_within_an_epoch_counts_epochs_right(kill, settings, whole, tmp_path, rhymerl):
    """Two passes are six steps, however often the run was interrupted."""
    words = [*words_for(settings, tmp_path / "run"), "trainer.max_steps=-1", "trainer.max_epochs=2"]
    if kill == signal.SIGINT:
        words.append("checkpoint.every_n_steps=100")  # only for being asked to stop
    for call in (3, 5):
        more = [f"algo={{_target_: tests.integration.programs.DieInUpdate, call: {call}, signal: {int(kill)}}}"]
        process = programs.start([*words, *more, *["ckpt_path=last"][: call - 3]], tmp_path / "output")
        process.join(600)
        assert process.exitcode == (-kill if kill == signal.SIGKILL else 130), (tmp_path / "output").read_text()
    assert checkpoint(tmp_path / "run")["rhymerl"]["num_rollouts"] in (3, 5)
    assert rhymerl(*words, "ckpt_path=last").code == 0
    assert_same_runs(tmp_path / "run", whole)


@pytest.mark.parametrize(
    "sent", [signal.SIGTERM, *(pytest.param(each, marks=pytest.mark.slow) for each in (signal.SIGHUP, signal.SIGUSR1))]
)
def test_told_to_end_it_saves_at_the_end_of_the_step(sent, settings, whole, tmp_path, rhymerl):
    """The signal comes from a cluster's scheduler, or because its terminal was closed; see Ctrl-C above."""
    words = [*words_for(settings, tmp_path / "run"), "checkpoint.every_n_steps=100"]
    stops = f"algo={{_target_: tests.integration.programs.DieInUpdate, call: 3, signal: {int(sent)}}}"
    process = programs.start([*words, stops], tmp_path / "output")
    process.join(600)
    said = (tmp_path / "output").read_text()
    assert process.exitcode == 128 + sent, said
    assert f"Stopping after this step; {sent.name} again stops at once." in said
    assert "Traceback" not in said
    assert checkpoint(tmp_path / "run")["rhymerl"]["num_rollouts"] == 2
    assert rhymerl(*words, "ckpt_path=last").code == 0
    assert_same_runs(tmp_path / "run", whole)


def test_a_terminal_that_is_closed_takes_no_step_with_it(settings, tmp_path):
    master, slave = pty.openpty()
    words = [*words_for(settings, tmp_path / "run"), "trainer.max_steps=600"]
    process = programs.run(run_on_terminal, words, os.ttyname(slave))
    shown = b""
    while b"reward" not in shown and process.is_alive():
        if select.select([master], [], [], 0.1)[0]:
            shown += os.read(master, 65536)
    os.close(slave)
    os.close(master)  # the kernel then sends SIGHUP
    process.join(600)
    assert process.exitcode == 128 + signal.SIGHUP, shown.decode()
    saved = checkpoint(tmp_path / "run")
    assert saved["callbacks"]["Summary"]["num_steps"] == saved["rhymerl"]["num_rollouts"] > 0
    assert (tmp_path / "run" / "summary.json").exists(), "it went on to its end"


def run_on_terminal(words: list[str], terminal: str) -> None:
    """Run with nothing but the terminal, as a shell would start it there."""
    from rhymerl.cli import main

    os.setsid()
    opened = os.open(terminal, os.O_RDWR)  # its first one, so that it is told when that is closed
    for each in (0, 1, 2):
        os.dup2(opened, each)
    os.close(opened)
    torch.set_num_threads(1)
    sys.exit(main(words))


@pytest.mark.parametrize("steps", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_ended_after_any_step_and_trained_further(steps, settings, whole, tmp_path, rhymerl):
    """Step 3 ends the first pass. The schedule is the constant one: the linear one follows from max_steps."""
    words = [*words_for(settings, tmp_path / "run"), "update.lr_schedule=constant"]
    assert rhymerl(*words, f"trainer.max_steps={2 * steps}").code == 0
    assert rhymerl(*words, "ckpt_path=last").code == 0
    words = [*words_for(settings, tmp_path / "whole"), "update.lr_schedule=constant"]
    assert rhymerl(*words).code == 0
    assert_same_runs(tmp_path / "run", tmp_path / "whole")


def test_an_unfinished_checkpoint_leaves_the_one_before(tmp_path):
    path = tmp_path / "last.ckpt"
    AtomicCheckpointIO().save_checkpoint({"weights": 1}, path)
    process = programs.run(programs.save_and_die, str(path))
    process.join(600)
    assert process.exitcode == -signal.SIGKILL
    assert torch.load(path, weights_only=True) == {"weights": 1}
    with pytest.raises(TypeError):
        AtomicCheckpointIO().save_checkpoint({"weights": (each for each in [])}, path)
    assert torch.load(path, weights_only=True) == {"weights": 1}
    AtomicCheckpointIO().save_checkpoint({"weights": 2}, path)
    assert torch.load(path, weights_only=True) == {"weights": 2}
    assert [each.name for each in tmp_path.iterdir()] == ["last.ckpt"]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ([], "holds another run"),
        (["ckpt_path=last", "data.seed=5"], "data.seed=5: the checkpoint was written with 0"),
        (["ckpt_path=last", "model.path=null", "model.init={model_type: llama, hidden_size: 8, intermediate_size: 8, "
          "num_hidden_layers: 1, num_attention_heads: 1, max_position_embeddings: 128}"],
         "of another model than model.path or model.init"),
        (["ckpt_path=last", "task.train_size=none"], "task.train_size='none'"),
    ],
)  # fmt: skip
def test_a_failed_start_leaves_the_other_run_as_it_is(more, message, settings, whole, rhymerl):
    before = {path: path.read_bytes() for path in sorted(whole.rglob("*")) if path.is_file()}
    done = rhymerl(*words_for(settings, whole), *more)
    assert done.code == 2
    assert message in done.err
    assert done.err.count("\n") == 1
    assert {path: path.read_bytes() for path in sorted(whole.rglob("*")) if path.is_file()} == before
