"""A reward that never works is no reward: the command stops and names it. One that fails at times is counted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rhymerl.errors import RewardError
from rhymerl.rewards import Reward
from rhymerl.rewards.failures import Failures
from tests.integration.conftest import Run, rows

BROKEN = "rewards={digits: tests.integration.rewards.digits, bad: tests.integration.rewards.broken}"
REASON = "the first with ZeroDivisionError: no marks today (rewards.py:"


def test_a_step_without_any_reward_ends_the_run(settings: list[str], tmp_path: Path, rhymerl: Run) -> None:
    done = rhymerl(*settings, BROKEN, f"run_dir={tmp_path / 'run'}", "trainer.limit_val_batches=0")
    assert done.code == 1
    error = next(line for line in done.err.splitlines() if line.startswith("error: "))
    assert error.startswith(
        "error: rewards.bad.function='tests.integration.rewards.broken': all 16 calls of a step failed"
    )
    assert REASON in error
    assert not (tmp_path / "run" / "summary.json").exists()


@pytest.mark.parametrize("command", ["fit", "evaluate"])
def test_an_evaluation_without_any_reward_ends_it(
    command: str, settings: list[str], tmp_path: Path, rhymerl: Run
) -> None:
    done = rhymerl(command, *settings[1:], BROKEN, f"run_dir={tmp_path / 'run'}")
    assert done.code == 1
    assert "rewards.bad.function='tests.integration.rewards.broken': all 4 calls of an evaluation failed" in done.err
    assert REASON in done.err


def test_a_reward_that_fails_at_times_is_counted(settings: list[str], tmp_path: Path, rhymerl: Run) -> None:
    rewards = "rewards={digits: tests.integration.rewards.digits, some: tests.integration.rewards.broken_for_some}"
    done = rhymerl(*settings, rewards, f"run_dir={tmp_path / 'run'}", "trainer.max_steps=4", "drafter=none")
    assert done.code == 0, done.err
    lengths = [len(row["response"]) for row in rows(tmp_path / "run" / "samples.jsonl")]
    assert any(length % 2 for length in lengths), "else nothing has failed"
    rate = json.loads((tmp_path / "run" / "summary.json").read_text())["reward_failure_rate"]
    assert 0 < rate < 0.5  # of the calls of two rewards, one of which never fails
    assert "reward_failure_rate" in done.out


def test_rates_are_those_of_all_ranks_together() -> None:
    reward = Reward("tests.integration.rewards.digits")
    one = Failures(num_samples=3, num_failed={"digits": 3}, first={"digits": "KeyError: 'a'"})
    (one + Failures(num_samples=1)).check([reward], "a step")
    Failures().check([reward], "a step")
    other = Failures(num_samples=1, num_failed={"digits": 1}, first={"digits": "KeyError: 'b'"})
    with pytest.raises(RewardError, match="all 4 calls of a step failed, the first with KeyError: 'a'"):
        (Failures() + one + other).check([reward], "a step")
