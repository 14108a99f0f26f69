"""The logged values are the same whichever way they take."""

from __future__ import annotations

import pytest
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rhymerl.training.loggers import log_metrics

METRICS = [{"reward": 0.5, "timing_s/step": 1e-3, "loss": float("nan")}, {"reward": 0.25, "num_tokens": 2.0**31}]


def scalars_of(folder) -> dict[str, list[tuple[int, str]]]:
    found = EventAccumulator(str(folder)).Reload()
    return {tag: [(each.step, str(each.value)) for each in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


@pytest.mark.parametrize("prefix", ["", "run"])
def test_tensorboard_reads_what_it_reads_of_lightnings_own_events(tmp_path, prefix):
    own, ours = (TensorBoardLogger(tmp_path, name=name, version="", prefix=prefix) for name in ("own", "ours"))
    for step, metrics in enumerate(METRICS, start=3):
        own.log_metrics(metrics, step=step)
        log_metrics(ours, metrics, step)
    own.finalize("success")
    ours.finalize("success")
    assert scalars_of(tmp_path / "ours") == scalars_of(tmp_path / "own")
    assert len(scalars_of(tmp_path / "own")) == 4


def test_a_step_is_one_event(tmp_path, monkeypatch):
    logger = TensorBoardLogger(tmp_path)
    summaries = []
    monkeypatch.setattr(logger.experiment.file_writer, "add_summary", lambda *of: summaries.append(of))
    log_metrics(logger, METRICS[0], 7)
    logger.experiment.close()
    ((summary, step),) = summaries
    assert (len(summary.value), step) == (3, 7)


def test_other_loggers_and_loggers_of_ones_own_get_what_they_always_got(tmp_path):
    class Mine(TensorBoardLogger):
        def log_metrics(self, metrics, step=None):
            heard.append((metrics, step))

    heard = []
    log_metrics(Mine(tmp_path), METRICS[0], 1)
    assert heard == [(METRICS[0], 1)]
    csv = CSVLogger(tmp_path, name="csv", version="")
    log_metrics(csv, METRICS[1], 2)
    csv.save()
    assert "reward" in (tmp_path / "csv" / "metrics.csv").read_text()
