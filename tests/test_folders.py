"""Directories of runs: one process each, nothing left of what was refused, and what is said of a full disk."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from rhymerl.callbacks import AtomicCheckpointIO
from rhymerl.errors import ConfigError, RunError
from rhymerl.folders import RunFolder, check_folder, open_folder, writing
from rhymerl.history.traces import TraceWriter
from tests.history.test_traces import step

HOLD = """
import sys, time
from pathlib import Path
from rhymerl.folders import RunFolder
with RunFolder(Path(sys.argv[1])) as folder:
    folder.open()
    print("held", flush=True)
    time.sleep(60)
"""


def holder(path: Path) -> subprocess.Popen[str]:
    """Another process that holds the directory already."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def end(process: subprocess.Popen[str], sent: signal.Signals) -> None:
    process.send_signal(sent)
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


def test_a_directory_belongs_to_one_process_which_is_named(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    process = holder(run_dir)
    try:
        for _ in range(2):  # being refused takes nothing away
            with pytest.raises(ConfigError) as caught, RunFolder(run_dir):
                pass
            assert str(caught.value).startswith(f"run_dir={str(run_dir)!r}: in use by process {process.pid} on ")
            assert "since " in str(caught.value)
            assert str(caught.value).endswith("; wait for its end, or give another directory")
    finally:
        end(process, signal.SIGKILL)
    with RunFolder(run_dir) as folder:  # at once
        folder.open()
        assert json.loads((run_dir / "run.lock").read_text())["pid"] == os.getpid()
    assert list(tmp_path.iterdir()) == [run_dir], "it was not made here"
    assert not (run_dir / "run.lock").exists()


def test_a_child_that_outlives_its_parent_does_not_hold_the_directory(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    program = HOLD.replace('print("held", flush=True)', "import os; os.write(1, b'%d\\n' % os.fork())")
    process = subprocess.Popen([sys.executable, "-c", program, str(run_dir)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    child = max(int(process.stdout.readline()) for _ in range(2))  # the child says 0, once it runs
    with pytest.raises(ConfigError, match=f"in use by process {process.pid} "), RunFolder(run_dir):
        pass
    end(process, signal.SIGKILL)
    try:
        os.kill(child, 0)
        with RunFolder(run_dir):
            pass
    finally:
        os.kill(child, signal.SIGKILL)


def test_two_that_begin_at_once(tmp_path: Path) -> None:
    """The first to come has it; a holder that goes at that very moment takes nobody's lock along."""
    words = [sys.executable, "-c", HOLD.replace("time.sleep(60)", "time.sleep(0.3)"), str(tmp_path / "run")]
    processes = [subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(4)]
    said = [process.communicate() for process in processes]
    codes = [process.returncode for process in processes]
    assert 0 in codes
    assert all(code == 0 or "in use by" in err for code, (_, err) in zip(codes, said, strict=True)), said


def test_many_try_out_one_directory_at_once(tmp_path: Path) -> None:
    """The file that one writes to try the directory out is not in another's way."""
    with ThreadPoolExecutor(8) as pool:
        tried = [pool.submit(open_folder, tmp_path / "run") for _ in range(400)]
    assert {each.result() for each in tried} == {tmp_path / "run"}
    assert list((tmp_path / "run").iterdir()) == []


def test_what_was_made_for_nothing_is_gone_again(tmp_path: Path) -> None:
    run_dir = tmp_path / "runs" / "mine"
    with RunFolder(run_dir):
        assert not (tmp_path / "runs").exists()
    with RunFolder(run_dir) as folder:
        folder.open()
        assert run_dir.is_dir()
    assert not (tmp_path / "runs").exists()
    (tmp_path / "runs").mkdir()
    with RunFolder(run_dir) as folder:
        folder.open()
        (run_dir / "summary.json").write_text("{}")
    assert [path.name for path in run_dir.iterdir()] == ["summary.json"]
    with RunFolder(tmp_path / "runs") as folder:
        folder.open()
    assert (tmp_path / "runs").exists(), "it was there before"


def test_a_link_in_the_place_of_the_lock_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=r"run\.lock cannot be written"), RunFolder(tmp_path / "run"):
        pass
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("name", ["a_file", "a_file/run", "a_file/run/deeper"])
def test_a_folder_that_cannot_be_made_is_known_before_it_is_made(name: str, tmp_path: Path) -> None:
    (tmp_path / "a_file").write_text("")
    with pytest.raises(ConfigError, match=f"^run_dir='{tmp_path / name}': Not a directory; give a directory"):
        check_folder(tmp_path / name)


@pytest.mark.parametrize(
    ("has", "may_start_over", "is_refused"),
    [
        ([], False, False),
        (["config.yaml", "tensorboard/events", "samples.jsonl"], False, True),
        (["config.yaml", "tensorboard/events", "samples.jsonl", "rollouts.jsonl.gz"], True, False),
        (["config.yaml", "checkpoints/step=3.ckpt"], True, True),
        (["config.yaml", "history.rhyme"], True, True),
        (["summary.json"], True, True),
        (["evaluations/step=0.jsonl"], False, False),
    ],
)
def test_a_run_that_may_start_over_takes_only_what_no_checkpoint_was_made_of(
    has: list[str], may_start_over: bool, is_refused: bool, tmp_path: Path
) -> None:
    for name in has:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    with RunFolder(tmp_path) as folder:
        if is_refused:
            with pytest.raises(ConfigError, match="holds another run"):
                folder.refuse_second_run(may_start_over=may_start_over)
            return
        folder.refuse_second_run(may_start_over=may_start_over)
        folder.open(starts_over=may_start_over)
    left = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    assert left == ([name for name in has if name == "config.yaml"] if may_start_over else has)


# -- full disks ------------------------------------------------------------------------------------------------------

FULL = (
    r"{}: cannot be written: No space left on device \([\d,]+ MiB left on its device\); what was saved before is whole"
)


def test_a_checkpoint_that_finds_no_space_is_named_and_leaves_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / "step=1.ckpt"
    AtomicCheckpointIO().save_checkpoint({"weights": 1}, path)
    (tmp_path / ".step=1.ckpt.part").symlink_to("/dev/full")
    with pytest.raises(RunError, match=FULL.format(path)) as caught:
        AtomicCheckpointIO().save_checkpoint({"weights": torch.zeros(10**6)}, path)
    assert "\n" not in str(caught.value)
    assert torch.load(path, weights_only=True) == {"weights": 1}
    assert [each.name for each in tmp_path.iterdir()] == ["step=1.ckpt"]


def test_a_recorded_rollout_that_finds_no_space_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    path.symlink_to("/dev/full")
    writer = TraceWriter(path, keep_bytes=0)
    with pytest.raises(RunError, match=FULL.format(path)):
        writer.write(step(0))
    writer.close()  # nothing is left to be written then


def test_other_errors_of_the_device_are_told_in_the_same_way() -> None:
    with pytest.raises(RunError, match="^mine/x: cannot be written: Input/output error"), writing(Path("mine/x")):
        raise OSError(5, "Input/output error")
