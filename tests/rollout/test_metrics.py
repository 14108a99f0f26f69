"""Metrics of several ranks together."""

from __future__ import annotations

import pickle
from dataclasses import replace

from rhymerl.history.answers import group_advantages
from rhymerl.rollout.metrics import rollout_metrics
from rhymerl.rollout.results import groups_that_teach_nothing
from rhymerl.types import Ratio
from rhymerl.workers.metrics import over_workers
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
