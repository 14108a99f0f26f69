"""A disk that is full costs one line, and none of what was saved."""

from __future__ import annotations

import errno
import os
import resource
import sys
from pathlib import Path
from typing import Any

import pytest
from tensorboard.summary.writer.record_writer import RecordWriter

from rhymerl.callbacks import SampleTable
from rhymerl.errors import RunError
from rhymerl.training.checkpoint import newest_whole
from tests.integration import programs
from tests.integration.conftest import Run
from tests.integration.test_resume import assert_same_runs, words_for


def run_within(words: list[str], most_bytes: int, output: str) -> None:
    """The command where no file may become longer."""
    import torch

    from rhymerl.cli import main

    torch.set_num_threads(1)
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for each in (1, 2):
        os.dup2(file, each)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most_bytes))
    sys.exit(main(words))


def test_no_room_for_a_checkpoint_in_the_middle_of_a_run(settings: list[str], tmp_path: Path, rhymerl: Run) -> None:
    words = words_for(settings, tmp_path / "run")
    assert rhymerl(*words, "trainer.max_steps=4", "update.lr_schedule=constant").code == 0
    most = (tmp_path / "run" / "checkpoints" / "step=2.ckpt").stat().st_size - 1000
    words = [*words, "update.lr_schedule=constant", "ckpt_path=auto"]
    process = programs.run(run_within, words, most, str(tmp_path / "output"))
    process.join(600)
    said = (tmp_path / "output").read_text()
    assert process.exitcode == 1, said
    path = tmp_path / "run" / "checkpoints" / "step=3.ckpt"
    (line,) = [line for line in said.splitlines() if line.startswith("error: ")]
    assert line.startswith(f"error: {path}: cannot be written: File too large (")
    assert line.endswith(" MiB left on its device); what was saved before is whole: make room, then go on from there")
    assert "Traceback" not in said
    assert newest_whole(path.parent)[0] == path.with_name("step=2.ckpt")
    assert rhymerl(*words).code == 0
    words = words_for(settings, tmp_path / "whole")
    assert rhymerl(*words, "update.lr_schedule=constant").code == 0
    assert_same_runs(tmp_path / "run", tmp_path / "whole")


def test_no_room_for_curves(settings: list[str], tmp_path: Path, rhymerl: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are written by a thread, whose error comes out later."""
    written = RecordWriter.write

    def write(self: Any, data: bytes) -> None:
        if b"rollout/tokens_per_s" in data:
            raise OSError(errno.ENOSPC, "No space left on device")
        written(self, data)

    monkeypatch.setattr(RecordWriter, "write", write)
    run_dir = tmp_path / "run"
    done = rhymerl(*words_for(settings, run_dir))
    assert done.code == 1
    assert done.err.startswith(f"error: {run_dir}: cannot be written: No space left on device (")
    assert done.err.count("\n") == 1


def test_no_room_for_samples(settings: list[str], tmp_path: Path, rhymerl: Run) -> None:
    table = tmp_path / "table.jsonl"

    class Full(SampleTable):
        def on_train_start(self, *args: Any) -> None:
            self.path.symlink_to("/dev/full")

    from rhymerl.config import compose
    from rhymerl.runs.fit import fit

    config = compose("quickstart", [*settings[2:], f"run_dir={tmp_path / 'run'}"])
    with pytest.raises(RunError, match=f"^{table}: cannot be written: No space left on device"):
        fit(config, callbacks=[Full(table)])
