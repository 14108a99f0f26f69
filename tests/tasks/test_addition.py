from __future__ import annotations

import pytest

from rhymerl.errors import ConfigError
from rhymerl.rewards import numeric_match
from rhymerl.tasks import Addition, split_of


def test_a_problem_is_a_chat_message_and_its_sum() -> None:
    task = Addition(train_size=50, validation_size=50)
    for split in ("train", "validation"):
        for row in task.rows(split):
            (message,) = row["prompt"]
            _, _, one, _, other, *_ = message["content"].replace("?", "").split()
            assert message["role"] == "user"
            assert int(one) + int(other) == int(row["answer"])
            assert 1 <= int(one) <= int(other) <= 99
            assert split_of(row["prompt"], task.tenths) == split


def test_the_last_number_counts() -> None:
    assert Addition.reward == "rhymerl.rewards.numeric_match"
    assert numeric_match("47 + 85 = 132.", answer="132") == 1
    assert numeric_match("132 is 47 + 85", answer="132") == 0


def test_an_instruction_is_the_system_message() -> None:
    (row,) = Addition(instruction="Be brief.", train_size=1).rows("train")
    assert [message["role"] for message in row["prompt"]] == ["system", "user"]
    assert row["prompt"][0]["content"] == "Be brief."


def test_chat_problems_are_distinct_and_a_larger_pool_only_adds() -> None:
    small, large = (Addition(train_size=size).rows("train") for size in (100, 200))
    assert large[:100] == small
    assert len({row["prompt"][0]["content"] for row in large}) == 200


def test_fewer_problems_than_asked_for() -> None:
    with pytest.raises(ConfigError, match=r"task.train_size=50: Addition has only \d+ problems for it"):
        Addition(max_number=9, train_size=50).rows("train")
    with pytest.raises(ValueError, match="max_number=0: expected at least 1"):
        Addition(max_number=0)
