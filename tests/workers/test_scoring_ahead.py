"""Rewards of the next step are computed while the policy is trained, and are those that they would be otherwise."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from rhymerl.errors import RewardError
from rhymerl.rewards import Reward, RewardScorer
from tests.rollout.ranked import SETTINGS, answers, check_kept, prompts, run_step
from tests.workers.fleet import alone, fleet, run

SLOW_S = 0.05


@pytest.fixture
def scored(tmp_path: Path):
    """What the reward was given so far."""
    path = tmp_path / "scored"
    path.touch()
    return lambda: path.read_text().splitlines()


@pytest.fixture
def scorer(tmp_path: Path):
    arguments = {"path": str(tmp_path / "scored"), "seconds": SLOW_S}
    with RewardScorer([Reward("tests.workers.slow_rewards.slow", name="length", arguments=arguments)]) as scorer:
        yield scorer


def is_scoring() -> bool:
    return any(thread.name == "scoring-ahead" for thread in threading.enumerate())


def wait_until(holds, within_s: float = 100.0) -> None:
    until = time.monotonic() + within_s
    while not holds() and time.monotonic() < until:
        time.sleep(0.01)
    assert holds()


def test_rewards_of_the_next_step_are_there_when_the_update_ends(scorer, scored):
    with fleet(pass_s=0.001, run_ahead="keep", workers=2, scorer=scorer) as (loop, _):
        steps = run(loop, [0])
        wait_until(lambda: len(scored()) == 24)  # during the update
        of_next = scored()[12:]
        steps += run(loop, [1])
        texts = [sample.text for sample in steps[1].samples]
        assert sorted(of_next) == sorted(texts)
        assert all(scored().count(text) == texts.count(text) for text in texts), "none is scored again"
    assert not is_scoring()
    check_kept(steps)
    for step in steps:
        assert [sample.reward for sample in step.samples] == [len(sample.text.split()) for sample in step.samples]


@pytest.mark.parametrize("run_ahead", ["draft", "keep"])
def test_samples_and_rewards_are_those_of_a_run_that_scores_nothing_ahead(run_ahead, scorer):
    with fleet(pass_s=0.0005, run_ahead=run_ahead, scorer=scorer) as (loop, _):
        steps = run(loop, range(4), update_s=0.3)
    check_kept(steps)
    for step in steps:
        assert [sample.reward for sample in step.samples] == [len(sample) for sample in step.samples]
        assert step.failures.num_samples == 12
    if run_ahead == "draft":
        assert [answers(step) for step in steps] == [answers(step) for step in alone(4)]


def test_an_evaluation_between_two_steps_is_scored_by_itself(scorer, scored):
    with fleet(pass_s=0.001, run_ahead="keep", scorer=scorer) as (loop, _):
        run(loop, [0])
        wait_until(lambda: len(scored()) > 14)  # in the middle of it
        loop.sync_weights([], 1)
        found = loop.run(prompts(0), "validation", SETTINGS, split="validation")
        assert [sample.reward for sample in found.samples] == [len(sample) for sample in found.samples]
        assert found.failures.num_samples == 12
        assert is_scoring()  # it goes on
        rollout = run_step(loop, 1)
        assert [sample.reward for sample in rollout.samples] == [len(sample) for sample in rollout.samples]
        wait_until(lambda: len(scored()) == 4 * 12)  # of the step after, too; none was scored twice


def test_other_prompts_than_announced_leave_nothing_behind(scorer, scored):
    with fleet(pass_s=0.001, run_ahead="keep", scorer=scorer) as (loop, _):
        run(loop, [0])
        wait_until(lambda: len(scored()) > 14)
        loop.sync_weights([], 1)
        rollout = loop.run(prompts(0), 1, SETTINGS, following=None)
        assert [sample.reward for sample in rollout.samples] == [len(sample) for sample in rollout.samples]
        assert rollout.failures.num_samples == 12
        assert not scorer._begun
        assert not loop._scoring_ahead._texts
        assert not is_scoring()


def test_a_step_that_is_repeated_is_scored_anew(scorer, scored):
    with fleet(pass_s=0.001, run_ahead="keep", scorer=scorer) as (loop, _):
        run(loop, [0])
        wait_until(lambda: len(scored()) == 24)
        rollout = run_step(loop, 0)
        assert [sample.reward for sample in rollout.samples] == [len(sample) for sample in rollout.samples]
        assert rollout.failures.num_samples == 12


def test_a_resumed_run_scores_again_what_was_not_collected(scorer, scored):
    with fleet(pass_s=0.001, run_ahead="keep", scorer=scorer) as (loop, _):
        run(loop, [0])
        wait_until(lambda: len(scored()) == 24)
        time.sleep(0.6)  # workers tell of their answers
        state = loop.state_dict()
    with fleet(pass_s=0.001, run_ahead="keep", scorer=scorer) as (loop, _):
        loop.load_state_dict(state)
        rollout = run_step(loop, 1)
        assert [sample.reward for sample in rollout.samples] == [len(sample) for sample in rollout.samples]


def test_an_error_meanwhile_reaches_the_trainer(scorer):
    """Columns that cannot be sent to a process are one."""
    unsendable = [replace(prompt, columns={"column": threading.Lock()}) for prompt in prompts(1)]
    with fleet(pass_s=0.001, run_ahead="keep", scorer=scorer) as (loop, _):
        loop.sync_weights([], 0)
        loop.run(prompts(0), 0, SETTINGS, following=unsendable)
        assert is_scoring()
        wait_until(lambda: not is_scoring())
        with pytest.raises(RewardError, match="its columns cannot be sent"):
            loop.run(unsendable, 1, SETTINGS)


@pytest.mark.parametrize("settings", [{"lockstep": True, "run_ahead": "keep"}, {"run_ahead": "off"}])
def test_nothing_runs_besides_in_lockstep_or_where_nobody_works_ahead(settings, scorer):
    with fleet(scorer=scorer, **settings) as (loop, _):
        run(loop, [0])
        assert not is_scoring()
