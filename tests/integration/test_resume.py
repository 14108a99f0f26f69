"""A run that is killed at any instant, or stopped, and resumed is the run that was never interrupted."""

from __future__ import annotations

import json
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.integration import programs
from tests.integration.conftest import Run, assert_same, checkpoint, rows

TABLE = "trainer.callbacks=[{{_target_: rhymerl.callbacks.SampleTable, path: {}, every_n_steps: 1, num_samples: 99}}]"


def words_for(settings: list[str], run_dir: Path) -> list[str]:
    return [*settings, f"run_dir={run_dir}", TABLE.format(run_dir / "all.jsonl")]


@pytest.fixture(scope="module")
def whole_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("whole") / "run"


@pytest.fixture
def whole(whole_dir: Path, settings: list[str], rhymerl: Run) -> Path:
    """The run directory of the uninterrupted run; made once."""
    if not whole_dir.exists():
        assert rhymerl(*words_for(settings, whole_dir)).code == 0
    return whole_dir


def state(run_dir: Path) -> dict[str, Any]:
    """All of the last checkpoint that does not follow the clock."""
    saved = checkpoint(run_dir)
    summary = saved["callbacks"]["Summary"]
    del summary["seconds"], saved["callbacks"]["_RunConfig"], saved["loops"], saved["hyper_parameters"]
    return saved


def assert_same_runs(run_dir: Path, whole: Path) -> None:
    assert_same(state(run_dir), state(whole))
    assert rows(run_dir / "all.jsonl") == rows(whole / "all.jsonl")
    assert {row["step"] for row in rows(run_dir / "all.jsonl")} == set(range(1, 7))
    one, two = (json.loads((each / "summary.json").read_text()) for each in (run_dir, whole))
    timeless = [name for name in two if not name.endswith("_s")]
    assert {name: one[name] for name in timeless} == {name: two[name] for name in timeless}


def killed(words: list[str], tmp_path: Path, *, when: Path | None = None, after_s: float = 0.0) -> None:
    """Run until it is dead: by its own hand, or by ours, `after_s` after the file `when` has appeared."""
    process = programs.start(words, tmp_path / "output")
    while when is not None and not when.exists() and process.is_alive():
        time.sleep(0.002)
    if when is not None:
        time.sleep(after_s)
        process.kill()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL, (tmp_path / "output").read_text()


@pytest.mark.parametrize(
    "killer",
    [
        "algo={_target_: tests.integration.programs.DieInUpdate, call: 4}",  # the second mini-batch of the second step
        "algo={_target_: tests.integration.programs.DieInUpdate, call: 7}",  # the first step of the second pass
        "drafter={_target_: tests.integration.programs.DieInRollout, call: 60}",
    ],
)
def test_killed_in_the_middle_of_a_step(killer, settings, whole, tmp_path, rhymerl):
    words = words_for(settings, tmp_path / "run")
    killed([*words, killer], tmp_path)
    steps = checkpoint(tmp_path / "run")["rhymerl"]["num_rollouts"]
    assert 0 < steps < 6
    assert rhymerl(*words, "ckpt_path=last").code == 0
    assert_same_runs(tmp_path / "run", whole)


@pytest.mark.parametrize("seed", range(2))
def test_killed_at_any_instant(seed, settings, whole, tmp_path, rhymerl):
    words = words_for(settings, tmp_path / "run")
    after_s = random.Random(f"{seed}/{time.time()}").uniform(0, 0.3)
    print(f"killed after {after_s} s")  # for a failure's report
    killed(words, tmp_path, when=tmp_path / "run" / "checkpoints" / "last.ckpt", after_s=after_s)
    assert rhymerl(*words, "ckpt_path=last").code == 0
    assert_same_runs(tmp_path / "run", whole)
