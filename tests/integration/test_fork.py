"""`rhymerl fork`: another run from a checkpoint of a run, with the same noise."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from rhymerl.report.paired import paired_difference
from rhymerl.report.reading import read_run
from tests.integration.conftest import Run, assert_same, checkpoint


@pytest.fixture
def parent(settings: list[str], rhymerl: Run, tmp_path: Path) -> Path:
    run_dir = tmp_path / "parent"
    assert rhymerl(*settings, "checkpoint.keep=9", "trainer.max_steps=6", f"run_dir={run_dir}").code == 0
    return run_dir


@pytest.mark.parametrize("step", [pytest.param("@0", marks=pytest.mark.slow), "@1"])
def test_a_fork_without_a_change_is_the_run_itself(step: str, parent: Path, rhymerl: Run, tmp_path: Path) -> None:
    before = sorted((path.name, path.stat().st_mtime_ns) for path in parent.rglob("*") if path.is_file())
    assert rhymerl("fork", f"{parent}{step}", f"run_dir={tmp_path / 'fork'}").code == 0
    assert_same(checkpoint(tmp_path / "fork")["state_dict"], checkpoint(parent)["state_dict"])
    assert before == sorted((path.name, path.stat().st_mtime_ns) for path in parent.rglob("*") if path.is_file())


def test_a_changed_setting_holds_and_the_noise_stays(parent: Path, rhymerl: Run, tmp_path: Path) -> None:
    fork = tmp_path / "fork"
    done = rhymerl("fork", f"run_dir={fork}", f"{parent}@1", "update.learning_rate=0.1")
    assert done.code == 0, done.err
    assert "Changed since then: update.learning_rate 0.01 -> 0.1" in done.out
    saved = yaml.safe_load((fork / "config.yaml").read_text())
    assert saved["ckpt_path"] == str(parent / "checkpoints" / "step=1.ckpt")
    found = paired_difference(read_run(parent), read_run(fork))
    assert found is not None
    assert [*found.steps] == [2, 3]
    assert (found.mean[0], found.variance[0]) == (0, 0)  # from the same policy with the same noise: the same answers
    assert found.variance[1] > 0  # the policies differ now


def test_a_run_without_a_step_is_forked_at_its_newest(parent: Path, rhymerl: Run, tmp_path: Path) -> None:
    words = ["fork", str(parent), f"run_dir={tmp_path / 'fork'}", "trainer.max_steps=8"]
    assert rhymerl(*words).code == 0
    assert checkpoint(tmp_path / "fork")["rhymerl"]["num_rollouts"] == 4


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "rhymerl fork needs RUN or RUN@STEP"),
        (["{run}@1"], "rhymerl fork needs run_dir=DIR: another directory than that of RUN"),
        (["{run}@1", "run_dir={run}"], "rhymerl fork needs run_dir=DIR: another directory than that of RUN"),
        (["{run}@1", "run_dir=new", "seed=1"], "rhymerl fork takes no seed=: a fork has the noise of its run"),
        (["{run}@1", "run_dir=new", "ckpt_path=last"], "rhymerl fork takes no ckpt_path=: RUN@STEP says it"),
        (["{run}@x", "run_dir=new"], "expected a number of steps behind the @"),
        (["{run}@5", "run_dir=new"], "has no checkpoint step=5.ckpt; it can be forked at 0, 1."),
        (["none@5", "run_dir=new"], "RUN='none': not the directory of a run (it has no config.yaml)"),
    ],
)
def test_bad_usage(words: list[str], message: str, rhymerl: Run, tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    (run / "config.yaml").write_text("defaults: [quickstart]\n")
    (run / "checkpoints" / "step=1.ckpt").touch()
    done = rhymerl("fork", *(word.format(run=run) for word in words))
    assert done.code == 2
    assert message in done.err
    assert not (tmp_path / "new").exists()
