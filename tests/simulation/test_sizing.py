"""How GPUs are divided: closed forms of pipelines with trainers of their own, and the table of all ways."""

from __future__ import annotations

import numpy as np
import pytest

from rhymerl.config import compose
from rhymerl.errors import ConfigError
from rhymerl.schedulers import FIFOScheduler
from rhymerl.simulation import Simulation, StepWork
from rhymerl.simulation.sizing import size, splits
from rhymerl.simulation.summary import Window, step_time
from rhymerl.testing import make_requests

SMALL = [
    "steps=12",
    "warm_up=4",
    "seeds=1",
    "gpus=8",
    "train_time=100",
    "lengths.prompts_per_step=16",
    "lengths.group_size=2",
]
SMALL += ["lengths.mean=200", "lengths.cap=800", "lengths.steps_per_epoch=2"]
PASS = 1 + 1 / 128


def steady(mode: str, *, rollout: int, train: float, delay: float, pipeline: str = "disaggregated") -> float:
    """The time of a step of two workers with one request of `rollout` tokens each."""
    requests = make_requests(2, max_tokens=1000)
    work = StepWork(requests=requests, lengths=np.full(2, rollout), is_cut=np.zeros(2, np.bool_))
    it = Simulation(
        FIFOScheduler(), num_workers=2, run_ahead=mode, pipeline=pipeline, train_time=train, weight_delay=delay
    )
    return step_time(it.run([work] * 41), Window(first=20, last=40), it.pause)


@pytest.mark.parametrize(("train", "delay"), [(0, 0), (10, 0), (10, 5), (100, 0), (95, 20), (300, 0), (300, 50)])
def test_steps_of_equal_answers_take_what_their_longest_cycle_takes(train, delay):
    rollout = 100 * PASS
    for pipeline in ("colocated", "disaggregated"):
        assert steady("off", rollout=100, train=train, delay=delay, pipeline=pipeline) == pytest.approx(
            rollout + train + delay
        )
    # A step's answers wait for the policy of the step before last.
    cycle = max(rollout, train, (rollout + train + delay) / 2)
    assert steady("keep", rollout=100, train=train, delay=delay) == pytest.approx(cycle)


def test_without_bubbles_and_drafts_overlap_hides_the_update():
    share = 0.3
    train = share / (1 - share) * 100 * PASS
    gain = steady("off", rollout=100, train=train, delay=0) / steady("keep", rollout=100, train=train, delay=0)
    assert gain == pytest.approx(1 / (1 - share))


def test_splits_leave_whole_workers_and_a_trainer():
    assert splits(2, 1) == [1]
    assert splits(8, 1) == [1, 2, 3, 4, 5]
    assert splits(8, 4) == [4]
    assert splits(9, 2) == [3, 5]
    for gpus, each in ((64, 8), (65, 8), (17, 3)):
        assert all((gpus - trainers) % each == 0 and 0 < trainers < gpus for trainers in splits(gpus, each))


def test_all_ways_the_fastest_first():
    result = size(compose("simulate", SMALL))
    rows = result["rows"]
    assert len({(row["scheduler"], row["run_ahead"], row["trainers"]) for row in rows}) == len(rows) == 5 * (3 + 2 * 5)
    assert [row["step_time"] for row in rows] == sorted(row["step_time"] for row in rows)
    barrier = next(row for row in rows if (row["scheduler"], row["run_ahead"]) == ("fifo", "off"))
    assert barrier["speedup_over_fifo_barrier"] == 1
    assert barrier["workers"] == 8
    assert rows[0]["run_ahead"] == "keep"
    for row in rows:
        assert (row["staleness_max"] > 0) == (row["run_ahead"] == "keep" and row["stale_token_frac"] > 0)
        if row["trainers"] is not None:
            assert row["workers"] + row["trainers"] == 8
            assert row["step_time"] > 0.9 * 100 * 8 / row["trainers"], "the trainer is the bound of a long run"
            assert 0 <= row["trainer_idle_frac"] < 1


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("gpus=1", "gpus=1: expected at least 2"),
        ("gpus_per_worker=0", "gpus_per_worker=0: expected at least 1"),
        ("gpus_per_worker=5", "gpus=8: expected at least 10"),
        ("weight_delay=-1", r"weight_delay=-1\.0: expected at least 0"),
    ],
)
def test_what_cannot_be_is_refused(setting, message):
    with pytest.raises(ConfigError, match=message):
        size(compose("simulate", [*SMALL, setting]))
