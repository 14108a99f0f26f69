"""A run that an earlier version made goes on: its config.yaml, its checkpoint and its history file, which name classes by former paths.

`earlier_version/` was made at commit ed7ece3, by three steps of two epochs with the quickstart's settings and a tiny model.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from rhymerl.history import HistoryStore
from tests.integration.conftest import Run, checkpoint


@pytest.fixture
def earlier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The run's folder; its settings name it, and the model's, relative to the current directory."""
    shutil.copytree(Path(__file__).with_name("earlier_version"), tmp_path, symlinks=True, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "run"


def test_it_names_classes_that_have_moved(earlier: Path) -> None:
    assert "_target_: rhymerl.update.UpdateSettings" in (earlier / "config.yaml").read_text()


def test_resume_goes_on(earlier: Path, rhymerl: Run) -> None:
    before = checkpoint(earlier)
    done = rhymerl("resume", str(earlier), "trainer.max_steps=5")
    assert done.code == 0, done.err
    after = checkpoint(earlier)
    assert (before["global_step"], after["global_step"]) == (3, 5)
    moments = [next(iter(each["optimizer_states"][0]["state"].values()))["step"] for each in (before, after)]
    assert [float(moment) for moment in moments] == [3, 5]
    assert history_tokens(after) > history_tokens(before) > 0


def test_its_checkpoint_starts_a_run_elsewhere(earlier: Path, rhymerl: Run) -> None:
    words = ["--config", str(earlier / "config.yaml"), f"ckpt_path={earlier / 'checkpoints' / 'step=3.ckpt'}"]
    done = rhymerl("fit", *words, "trainer.max_steps=4", "run_dir=elsewhere")
    assert done.code == 0, done.err
    assert checkpoint(Path("elsewhere"))["global_step"] == 4


def test_its_history_file_serves_a_new_run(earlier: Path, rhymerl: Run) -> None:
    words = ["--config", str(earlier / "config.yaml"), f"history_file={earlier / 'history.rhyme'}"]
    done = rhymerl("fit", *words, "trainer.max_steps=1", "run_dir=new")
    assert done.code == 0, done.err
    assert history_tokens(checkpoint(Path("new"))) > history_tokens(checkpoint(earlier))


def history_tokens(state: dict[str, Any]) -> int:
    store = HistoryStore()
    store.load_state_dict(state["rhymerl"]["history"])
    store.check_integrity()
    return store.num_tokens
