from __future__ import annotations

import os
import random
import subprocess
import sys
from itertools import islice
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rhymerl.tasks import RunningSum, split_of
from rhymerl.tasks.base import TaskSplit
from rhymerl.tasks.running_sum import CHARACTERS, running_sum_reward

SPLITS: tuple[TaskSplit, ...] = ("train", "validation", "warmstart")


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32), st.integers(0, 2**32), st.integers(1, 15))
def test_splits_are_disjoint_whatever_the_seeds(seed: int, other: int, difficulty: int) -> None:
    task = RunningSum(difficulty=difficulty)
    for split, draw_seed in zip(SPLITS, (seed, other, seed), strict=True):
        for row in islice(task.stream(split, seed=draw_seed), 20):
            assert split_of(row["prompt"]) == split


def test_a_pool_is_distinct_and_of_the_asked_size() -> None:
    task = RunningSum(train_size=300, validation_size=100)
    train = {row["prompt"] for row in task.rows("train")}
    validation = {row["prompt"] for row in task.rows("validation")}
    assert (len(train), len(validation)) == (300, 100)
    assert not train & validation


def test_a_larger_pool_only_adds() -> None:
    small, large = RunningSum(train_size=20).rows("train"), RunningSum(train_size=40).rows("train")
    assert large[:20] == small
    assert RunningSum(train_size=20, seed=1).rows("train") != small


def test_a_prefix_stands_before_the_sum_and_nowhere_else():
    task, plain = RunningSum(prefix="Add: 1+", train_size=20), RunningSum()
    for row in task.rows("train"):
        bare = {**row, "prompt": row["prompt"].removeprefix("Add: 1+")}
        assert len(bare["prompt"]) == len(row["prompt"]) - 7
        assert sum(map(int, bare["prompt"][:-3].split("+"))) == int(row["answer"])
        assert task.demonstration(row, random.Random(0)) == plain.demonstration(bare, random.Random(0))


def demonstrations(task: RunningSum, number: int) -> list[tuple[dict[str, Any], str]]:
    source = random.Random(0)
    return [(row, task.demonstration(row, source)) for row in islice(task.stream("warmstart", seed=0), number)]


@pytest.mark.parametrize("difficulty", [1, 7, 15])
def test_demonstrations_without_errors_are_right(difficulty: int) -> None:
    for row, text in demonstrations(RunningSum(difficulty=difficulty, error_rate=0.0), 300):
        assert running_sum_reward(text, answer=row["answer"]) == 1.0
        assert set(row["prompt"] + text) <= set(CHARACTERS)


def test_planted_errors_cost_what_they_should() -> None:
    # k additions are all right with probability (1 - e)^k; a later slip undoes an earlier one too rarely to
    # matter. 3 000 draws a k: a standard error of at most 0.01.
    task, error_rate, source = RunningSum(error_rate=0.2), 0.2, random.Random(1)
    for additions in (1, 3, 7):
        row = {"prompt": "+".join(["17"] * (additions + 1)) + "=?\n", "answer": str(17 * (additions + 1))}
        scores = [running_sum_reward(task.demonstration(row, source), answer=row["answer"]) for _ in range(3000)]
        assert sum(scores) / len(scores) == pytest.approx((1 - error_rate) ** additions, abs=0.04)


def test_answer_lengths_vary_by_four_or_more() -> None:
    lengths = sorted(len(text) for _, text in demonstrations(RunningSum(), 400))
    assert lengths[int(0.95 * len(lengths))] >= 4 * lengths[int(0.05 * len(lengths))]


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("1+2=3;#3", 1.0),
        ("#3", 1.0),
        ("#4;#3 ", 1.0),
        ("3", 0.0),
        ("#3;#4", 0.0),
        ("#33", 0.0),
        ("#03", 0.0),
        ("#", 0.0),
        ("", 0.0),
    ],
)
def test_the_reward_reads_the_text_after_the_last_mark(completion: str, reward: float) -> None:
    assert running_sum_reward(completion, answer="3") == reward


@pytest.mark.parametrize("setting", [{"difficulty": 0}, {"difficulty": 16}, {"error_rate": 1.0}])
def test_settings_out_of_range_are_refused(setting: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"^{next(iter(setting))}="):
        RunningSum(**setting)


def test_problems_are_the_same_in_every_process() -> None:
    program = (
        "from rhymerl.tasks import RunningSum\nimport random\ntask = RunningSum(train_size=5)\n"
        "rows = task.rows('train')\nprint(rows, task.demonstration(rows[0], random.Random(0)))"
    )
    outputs = [
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("1", "2")
    ]
    rows = RunningSum(train_size=5).rows("train")
    expected = f"{rows} {RunningSum().demonstration(rows[0], random.Random(0))}\n"
    assert outputs == [expected, expected]


@pytest.mark.parametrize("name", ["train_size", "validation_size"])
def test_an_empty_pool_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}=0: expected at least 1"):
        RunningSum(**{name: 0})
