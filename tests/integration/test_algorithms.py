"""PPO, and every switch of rollout and update, train three steps from the command line."""

from __future__ import annotations

import json
import math

import pytest

from tests.integration.conftest import checkpoint

SWITCHES = [
    "algo=ppo",
    "rollout.dynamic_sampling=2",
    "update.epochs=2",
    "update.activation_checkpointing=true",
    "adapter=lora",
]


@pytest.mark.parametrize("words", SWITCHES)
def test_three_steps(words, settings, tmp_path, rhymerl):
    steps = 12 if words == "update.epochs=2" else 6  # two mini-batches an epoch
    done = rhymerl(*settings, words, f"trainer.max_steps={steps}", f"run_dir={tmp_path / 'run'}")
    assert done.code == 0, done.err
    result = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert result["steps"] == 3
    assert math.isfinite(result["reward_last"])
    assert checkpoint(tmp_path / "run")["rhymerl"]["num_rollouts"] == 3
