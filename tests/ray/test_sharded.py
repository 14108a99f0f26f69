"""Sharded ranks with workers in Ray actors: the tokens and weights of one process, validation and export included."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rhymerl.runs.export import export
from rhymerl.testing import tiny_policy
from tests.ray.commands import answers, fit, furthest, one_process, weights

pytestmark = pytest.mark.ray
SHARDED = ["trainer.strategy=fsdp2", "trainer.accelerator=cpu", "trainer.devices=2"]


@pytest.fixture
def policy(tmp_path) -> list[str]:
    """Return settings of a float32 policy without norms: a weight off by 1e-15 changes rounding, and others by 1e-8."""
    tiny_policy("starcoder2", use_bias=False, peaked=2.0).save(tmp_path / "start")
    return [f"model.path={tmp_path / 'start'}", "rewards=tests.integration.rewards.digits"]


def evaluated(run_dir: Path) -> list[float]:
    summary = json.loads((run_dir / "summary.json").read_text())
    return [summary["eval_reward_before"], summary["eval_reward_after"]]


@pytest.mark.parametrize("run_ahead", ["'off'", "draft"])
def test_tokens_and_weights_are_those_of_one_process(run_ahead, policy, tmp_path):
    settings = [*policy, "trainer.limit_val_batches=null"]
    one_process(tmp_path / "alone", *settings)
    fit(tmp_path / "run", *SHARDED, f"run_ahead={run_ahead}", *settings)
    assert answers(tmp_path / "run") == answers(tmp_path / "alone")
    assert furthest(weights(tmp_path / "run"), weights(tmp_path / "alone")) < 1e-9
    assert evaluated(tmp_path / "run") == evaluated(tmp_path / "alone")
    assert (export(tmp_path / "run", tmp_path / "policy") / "model.safetensors").is_file()


def test_a_sharded_run_goes_on_in_one_process(policy, tmp_path):
    one_process(tmp_path / "alone", *policy)
    fit(tmp_path / "run", *SHARDED, *policy, "run_ahead='off'", "trainer.max_steps=3")
    one_process(tmp_path / "run", *policy, "ckpt_path=auto", "workers=null")
    assert answers(tmp_path / "run") == answers(tmp_path / "alone")
    assert furthest(weights(tmp_path / "run"), weights(tmp_path / "alone")) < 1e-9
