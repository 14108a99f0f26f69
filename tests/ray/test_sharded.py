"""Sharded ranks with workers in Ray actors: the tokens and weights of one process, validation and export included."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rhymerl.runs.export import export
from tests.ray.commands import answers, fit, furthest, one_process, weights

pytestmark = [pytest.mark.ray, pytest.mark.timeout(400)]
SHARDED = ["trainer.strategy=fsdp2", "trainer.accelerator=cpu", "trainer.devices=2"]


def evaluated(run_dir: Path) -> list[float]:
    summary = json.loads((run_dir / "summary.json").read_text())
    return [summary["eval_reward_before"], summary["eval_reward_after"]]


@pytest.mark.parametrize("run_ahead", ["'off'", "draft"])
def test_tokens_and_weights_are_those_of_one_process(run_ahead, tmp_path):
    one_process(tmp_path / "alone", "trainer.limit_val_batches=null")
    fit(tmp_path / "run", *SHARDED, f"run_ahead={run_ahead}", "trainer.limit_val_batches=null")
    assert answers(tmp_path / "run") == answers(tmp_path / "alone")
    assert furthest(weights(tmp_path / "run"), weights(tmp_path / "alone")) < 1e-9
    assert evaluated(tmp_path / "run") == evaluated(tmp_path / "alone")
    assert (export(tmp_path / "run", tmp_path / "policy") / "model.safetensors").is_file()


def test_a_sharded_run_goes_on_in_one_process(tmp_path):
    one_process(tmp_path / "alone")
    fit(tmp_path / "run", *SHARDED, "run_ahead='off'", "trainer.max_steps=3")
    one_process(tmp_path / "run", "ckpt_path=auto", "workers=null")
    assert answers(tmp_path / "run") == answers(tmp_path / "alone")
    assert furthest(weights(tmp_path / "run"), weights(tmp_path / "alone")) < 1e-9
