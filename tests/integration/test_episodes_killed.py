"""A run of several turns killed at any instant, also while its environment is asked, resumes to equal weights."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.integration.conftest import Run, made_once
from tests.integration.test_resume import assert_same_runs, killed, words_for

EPISODES = [
    "environment={_target_: tests.environments.worlds.Ponders}",
    "rollout.stop_token_ids=[2,3,4]",
    "rollout.max_turns=3",
]


@pytest.fixture
def whole(whole_dir: Path, settings: list[str], rhymerl: Run) -> Path:
    """The run directory of the uninterrupted run; made once."""
    return made_once(whole_dir, words_for([*settings, *EPISODES], whole_dir), rhymerl)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 20))])
def test_killed_at_any_instant(seed, settings, whole, tmp_path, rhymerl):
    """Two thirds of a rollout's time are spent in the environment."""
    words = words_for([*settings, *EPISODES], tmp_path / "run")
    after_s = random.Random(seed).uniform(0, 1.0)
    killed(words, tmp_path, when=tmp_path / "run" / "checkpoints" / "last.ckpt", after_s=after_s)
    assert rhymerl(*words, "ckpt_path=last").code == 0
    assert_same_runs(tmp_path / "run", whole)
