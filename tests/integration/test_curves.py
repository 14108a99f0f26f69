"""The frequency of a run's logging, and what Lightning's own bar shows of it."""

from __future__ import annotations

import csv
import re
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger

from rhymerl import PromptDataModule, RhymeModule
from rhymerl.rollout import RolloutSettings
from tests.integration.conftest import Run
from tests.integration.training import PROMPTS, REWARD

STEPS = [1, 2, 3, 4]


def trained(model_dir: Path, **flags: Any) -> L.Trainer:
    module = RhymeModule(str(model_dir), rewards=REWARD, rollout=RolloutSettings(group_size=2, max_tokens=8))
    trainer = L.Trainer(devices=1, max_steps=4, enable_checkpointing=False, enable_model_summary=False, **flags)
    trainer.fit(module, PromptDataModule(PROMPTS, prompts_per_step=2))
    return trainer


def logged(folder: str | Path) -> list[int]:
    rows = csv.DictReader(Path(folder, "metrics.csv").read_text().splitlines())
    return [int(row["step"]) for row in rows if row["reward"]]


@pytest.mark.parametrize(("flags", "steps"), [({}, STEPS), ({"log_every_n_steps": 2}, [2, 4])], ids=str)
def test_each_step_is_logged_unless_the_trainer_was_told_otherwise(
    flags: dict[str, int], steps: list[int], model_dir: Path, tmp_path: Path
) -> None:
    logger = CSVLogger(tmp_path)
    trained(model_dir, logger=logger, enable_progress_bar=False, **flags)
    assert logged(logger.log_dir) == steps


@pytest.mark.parametrize(
    ("every", "steps"),
    [
        pytest.param("50", [], marks=pytest.mark.slow),
        pytest.param("null", STEPS, marks=pytest.mark.slow),
        ("2", [2, 4]),
    ],
)
def test_what_the_config_says_holds(
    every: str, steps: list[int], settings: list[str], tmp_path: Path, rhymerl: Run
) -> None:
    csv_logger = (
        f"trainer.logger={{_target_: lightning.pytorch.loggers.CSVLogger, save_dir: '{tmp_path}', version: one}}"
    )
    more = ["trainer.max_steps=4", "update.mini_batches=1", "trainer.limit_val_batches=0", "drafter=none", csv_logger]
    done = rhymerl(*settings, *more, f"trainer.log_every_n_steps={every}", f"run_dir={tmp_path / 'run'}")
    assert done.code == 0, done.err
    path = tmp_path / "lightning_logs" / "one"
    assert (logged(path) if (path / "metrics.csv").exists() else []) == steps


@pytest.mark.parametrize("bar", [TQDMProgressBar, pytest.param(RichProgressBar, marks=pytest.mark.slow)])
def test_lightnings_bar_shows_the_reward(bar: type[Any], model_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    trainer = trained(model_dir, callbacks=[bar()], logger=False)
    shown = trainer.progress_bar_callback.get_metrics(trainer, trainer.lightning_module)
    for name, metric in (("reward", "reward"), ("length", "completions/mean_length")):
        assert shown[name] == pytest.approx(float(trainer.callback_metrics[metric]), abs=1e-3)
    if bar is TQDMProgressBar:
        out, err = capfd.readouterr()
        assert re.search(r"reward=\d\.\d+, length=\d+", out + err)
