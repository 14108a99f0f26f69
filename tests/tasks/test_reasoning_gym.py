from __future__ import annotations

import json
import random
import sys
from itertools import islice
from typing import Any

import pytest

from rhymerl.errors import ConfigError
from rhymerl.rewards.sandbox.wire import decode
from rhymerl.tasks.reasoning_gym import ReasoningGym, _pack


@pytest.fixture
def package() -> Any:
    return pytest.importorskip("reasoning_gym")


def task(dataset: str = "chain_sum", **settings: Any) -> ReasoningGym:
    return ReasoningGym(dataset, **{"train_size": 30, "validation_size": 20, **settings})


def test_splits_are_disjoint_distinct_and_repeatable(package: Any) -> None:
    train, validation = task().rows("train"), task(seed=1).rows("validation")
    shown = list(islice(task(seed=2).stream("warmstart", seed=3), 40))
    questions = [{row["question"] for row in rows} for rows in (train, validation, shown)]
    assert [len(part) for part in questions[:2]] == [30, 20]
    assert not questions[0] & questions[1]
    assert not questions[2] & (questions[0] | questions[1])
    assert task().rows("train") == train
    assert task(seed=1).rows("train") != train


def test_settings_reach_the_data_set(package: Any) -> None:
    rows = task(settings={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}).rows("train")
    assert all(row["question"].count(" + ") + row["question"].count(" - ") == 1 for row in rows)


def test_prompts_come_as_chat_or_as_text(package: Any) -> None:
    system, user = task(train_size=1).rows("train")[0]["prompt"]
    assert system["role"] == "system"
    assert "<answer>" in system["content"]
    assert user["role"] == "user"
    plain = task(train_size=1, system_prompt=None, chat=False, answer_tag=None).rows("train")[0]
    assert plain["prompt"] == plain["question"] + "\n" == user["content"] + "\n"
    own = task(train_size=1, system_prompt="Be brief.", chat=False).rows("train")[0]
    assert own["prompt"].startswith("Be brief.\n\n")


def test_a_demonstration_is_the_answer(package: Any) -> None:
    for tag, words in (("answer", "<answer>{}</answer>"), (None, "{}")):
        made = task(answer_tag=tag)
        row = next(made.stream("warmstart", seed=0))
        assert made.demonstration(row, random.Random(0)) == words.format(row["answer"])
    with pytest.raises(TypeError, match="chain_sum gives no answers"):
        task().demonstration({"answer": None}, random.Random(0))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dataset": "chain_sums"}, r"^dataset='chain_sums': .* did you mean .*chain_sum"),
        ({"settings": {"no_such": 1}}, r"^settings=.*no_such"),
        ({"settings": {"min_terms": 9, "max_terms": 2}}, r"^settings=.*max_terms must be >= min_terms"),
        ({"settings": {"seed": 1}}, r"^settings\.seed: set seed, train_size and validation_size instead$"),
    ],
)
def test_names_a_setting_that_is_wrong(package: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        task(**settings)


def test_too_few_problems_are_an_error(package: Any) -> None:
    narrow = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    with pytest.raises(ConfigError, match=r"task\.train_size=500: expected at most \d\d"):
        task(settings=narrow, train_size=500).rows("train")


def test_a_missing_package_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(
        ConfigError, match=r"task=reasoning_gym needs reasoning-gym: pip install 'rhymerl\[reasoning\]'"
    ):
        task()


@pytest.mark.parametrize("value", [1, "a", None, (1, (2, [3])), {1: (2,), "a": {}}, {"tuple": [1], "dict": []}])
def test_packed_values_come_back_as_they_were(value: Any) -> None:
    assert decode(json.loads(json.dumps(_pack(value)))) == value
