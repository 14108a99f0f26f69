"""Metrics of several ranks together."""

from __future__ import annotations

import math
import pickle
from dataclasses import replace

import numpy as np
import pytest

from rhymerl.history.answers import answers_of, group_advantages
from rhymerl.rollout.metrics import episode_metrics, rollout_metrics
from rhymerl.rollout.results import groups_that_teach_nothing
from rhymerl.types import Output, Ratio, TurnEnd
from rhymerl.workers.base import over_workers
from tests.training.updates import scored


def test_a_ratio_is_a_number_that_knows_its_parts():
    ratio = Ratio(3, 4)
    assert ratio == 0.75
    assert Ratio(3, 0) == 0.0
    again = pickle.loads(pickle.dumps(ratio))
    assert (again, again.part, again.whole) == (0.75, 3, 4)


def test_each_kind_of_metric_over_ranks():
    one = {"count": 2, "rate": Ratio(1, 10), "mean": 1.0, "only one": Ratio(1, 2)}
    other = {"count": 3, "rate": Ratio(80, 80), "mean": 4.0}
    idle = {"count": 0, "rate": Ratio(0, 0), "mean": 0.0}
    found = over_workers([one, other, idle], [1.0, 2.0, 0.0])
    assert found == {"count": 5.0, "rate": 81 / 90, "mean": 3.0, "only one": 0.5}
    assert {type(value) for value in found.values()} == {float}


def test_a_mean_without_weights_is_the_first_value():
    assert over_workers([{"mean": 2.0}, {"mean": 4.0}], [0.0, 0.0]) == {"mean": 2.0}


def test_equal_rewards_have_no_deviation_whatever_rounding_leaves():
    samples = [sample for i, sample in enumerate(scored(12)) if i % 4]  # groups of three
    for rewards in ([0.1, 0.1, 0.1], [0.1 + 0.2, 0.3, 0.3]):
        same = [replace(sample, reward=rewards[i % 3]) for i, sample in enumerate(samples)]
        assert len(groups_that_teach_nothing(same)) == 3
        assert group_advantages(rewards).tolist() == [0, 0, 0]
    metrics = rollout_metrics(same)
    assert metrics["reward_std"] == 0
    assert metrics["frac_reward_zero_std"] == 1


def test_samples_to_which_no_reward_applies_count_nowhere():
    nan = math.nan
    rewards = [1.0, nan, 3.0, nan, nan, nan, nan, nan, 2.0, 2.0, 2.0, nan]
    samples = [replace(sample, reward=reward) for sample, reward in zip(scored(12), rewards, strict=True)]
    samples = [
        replace(sample, rewards={"one": sample.reward} if sample.has_reward else {}) if i < 8 else sample
        for i, sample in enumerate(samples)
    ]
    metrics = rollout_metrics(samples)
    assert metrics["reward"] == pytest.approx(2.0)
    assert metrics["reward_std"] == pytest.approx(0.5)  # 1 and 0, of two groups
    assert metrics["frac_reward_zero_std"] == pytest.approx(0.5)
    assert (metrics["rewards/one/mean"], metrics["rewards/one/std"]) == (2.0, 1.0)
    assert len(groups_that_teach_nothing(samples)) == 2
    assert group_advantages(rewards[:4]).tolist() == [-1, 0, 1, 0]
    assert group_advantages(rewards[4:8]).tolist() == [0, 0, 0, 0]
    answers = [answer for _, group in answers_of(samples, 0) for answer in group]
    assert [answer.reward for answer in answers] == [0.0 if math.isnan(reward) else reward for reward in rewards]
    nothing = rollout_metrics([replace(sample, reward=nan, rewards={}) for sample in samples])
    assert not any(name.startswith("reward/") or name == "reward" for name in nothing)
    assert (nothing["reward_std"], nothing["frac_reward_zero_std"]) == (0.0, 1.0)
    assert np.isfinite(list(nothing.values())).all()


def test_the_worth_of_remembered_replies_is_counted_over_all_turns():
    turns = [TurnEnd(start=3, stop=5, text="", waited_s=1.0, saved_s=saved_s) for saved_s in (None, 2.0, 0.5)]
    outputs = [replace(Output.of(range(9), finish_reason="stop"), turns=part) for part in (tuple(turns), (turns[0],))]
    metrics = episode_metrics(outputs)
    assert metrics["environment/remembered_frac"] == 2 / 4
    assert metrics["environment/saved_s"] == 2.5
