"""Curves from TensorBoard's files, for runs that recorded nothing for a report."""

from __future__ import annotations

from pathlib import Path

import pytest

from rhymerl.report.curves import curves_of, read_tensorboard


def write(folder: Path, points: dict[int, float], **settings) -> None:
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(folder, **settings) as writer:
        for step, value in points.items():
            writer.add_scalar("reward", value, step)


def test_a_resumed_run_has_the_newer_values_of_what_it_repeated(tmp_path: Path):
    write(tmp_path, {1: 0.5, 2: 0.25, 3: 9.0}, filename_suffix=".0")
    write(tmp_path, {3: 0.75, 4: 1.0}, purge_step=3, filename_suffix=".1")
    (curve,) = read_tensorboard(tmp_path).values()
    assert list(curve.items()) == [(1, 0.5), (2, 0.25), (3, 0.75), (4, 1.0)]


def test_an_empty_folder_and_an_empty_file_have_no_curves(tmp_path: Path):
    assert read_tensorboard(tmp_path) == {}
    (tmp_path / "events.out.tfevents.1").touch()
    assert read_tensorboard(tmp_path) == {}


def test_metrics_that_some_steps_lack():
    found = curves_of([(1, {"a": 1.0}), (2, {}), (3, {"a": 2.0, "b": 3.0})])
    assert found == {"a": {1: 1.0, 3: 2.0}, "b": {3: 3.0}}


@pytest.mark.parametrize("missing", [0, 1])
def test_steps_may_come_in_any_order(missing):
    found = curves_of([(2, {"a": 1.0}), (missing, {"a": 0.0})])
    assert list(found["a"]) == [missing, 2]
