"""The loggers of a run: by name, by class, several at once; samples reach those that can show them."""

from __future__ import annotations

import csv
import importlib.util
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rhymerl.config import compose
from tests.integration.conftest import Run

MINE = """
from lightning.pytorch.loggers import Logger

class Mine(Logger):
    tables, steps = [], []

    name = version = "mine"

    def log_hyperparams(self, params): ...

    def log_metrics(self, metrics, step=None):
        Mine.steps.append(step)

    def log_table(self, key, columns, data, step):
        Mine.tables.append((key, columns, data, step))
"""


@pytest.fixture
def short(settings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    Path("my_logger.py").write_text(MINE)
    return [*settings, "update.mini_batches=1", "trainer.max_steps=3", "run_dir=run"]


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_each_of_several_loggers_gets_curves_and_samples(short: list[str], rhymerl: Run) -> None:
    done = rhymerl(*short, "logger=[tensorboard,csv,my_logger.Mine]")
    assert done.code == 0, done.err
    metrics = rows_of(Path("run/csv/version_0/metrics.csv"))
    assert [row["step"] for row in metrics if row["reward"]] == ["1", "2", "3"]
    assert [row["step"] for row in metrics if row["eval/reward"]] == ["0", "3"]
    samples = rows_of(Path("run/csv/version_0/samples.csv"))
    assert len(samples) == 4
    import my_logger  # type: ignore[import-not-found]

    ((name, columns, data, step),) = my_logger.Mine.tables
    assert (name, step, len(data)) == ("samples", 1, 4)
    assert [dict(zip(columns, map(str, row), strict=True)) for row in data] == samples
    assert {1, 2, 3} <= set(my_logger.Mine.steps)
    board = EventAccumulator("run/tensorboard", size_guidance={"histograms": 0}).Reload()
    tags: dict[str, Any] = board.Tags()
    assert tags["tensors"] == ["samples/text_summary"]
    assert set(tags["histograms"]) == {"spec/accept_rate_of_answer", "spec/accepted_in_a_row"}
    assert "csv/" in done.out


def test_a_resumed_run_begins_a_csv_of_its_own(short: list[str], rhymerl: Run) -> None:
    assert rhymerl(*short, "logger=csv", "checkpoint.every_n_steps=1", "trainer.max_steps=2").code == 0
    done = rhymerl("resume", "run", "trainer.max_steps=3")
    assert (done.code, done.err) == (0, "")
    first, second = (rows_of(Path(f"run/csv/version_{number}/metrics.csv")) for number in (0, 1))
    assert [row["step"] for row in (*first, *second) if row["reward"]] == ["1", "2", "3"]
    assert not Path("run/tensorboard").exists()


def test_none(short: list[str], rhymerl: Run) -> None:
    assert rhymerl(*short, "logger=null", "trainer.max_steps=1").code == 0
    assert not Path("run/tensorboard").exists()


def test_a_list_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("defaults: [quickstart, _self_]\nlogger: [csv, tensorboard]\n")
    assert compose(file).logger == ["csv", "tensorboard"]
    assert compose(file, ["logger=csv"]).logger.name == "csv"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["logger=[csv,tensorbord]"], "logger='tensorbord': expected csv, tensorboard, wandb, a dotted class path,"),
        (["logger=[csv,3]"], "logger=3: expected csv, tensorboard, wandb, a dotted class path,"),
        (["logger=collections.OrderedDict"], "logger=collections.OrderedDict: expected a Lightning Logger"),
        (["logger=csv", "trainer.logger=false"], "trainer.logger=False: the run has `logger` already"),
    ],
)
def test_a_wrong_one_is_one_line(words: list[str], told: str, short: list[str], rhymerl: Run) -> None:
    done = rhymerl(*short, *words)
    assert done.code == 2
    assert told in done.err
    assert len(done.err.splitlines()) == 1
    assert not Path("run").exists()


@pytest.mark.skipif(importlib.util.find_spec("wandb") is not None, reason="wandb is there")
def test_wandb_is_an_extra(short: list[str], rhymerl: Run) -> None:
    done = rhymerl(*short, "logger=wandb")
    assert (done.code, done.err.splitlines()) == (
        2,
        ["error: logger=lightning.pytorch.loggers.WandbLogger needs wandb: pip install 'rhymerl[wandb]'"],
    )
