"""What the data module makes of its settings, and which it refuses."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from rhymerl.data import LengthLimits, PromptDataModule, PromptEncoder
from rhymerl.data.base import columns_of
from rhymerl.errors import ConfigError, DataError
from rhymerl.tasks import RunningSum

ROWS = [{"prompt": f"{i}+1=?", "id": i} for i in range(7)]
Prepare = Callable[[PromptDataModule], PromptDataModule]


@pytest.fixture
def prepare(characters: PreTrainedTokenizerBase, limits: LengthLimits) -> Prepare:
    def prepare(module: PromptDataModule) -> PromptDataModule:
        module.prepare(PromptEncoder(characters), limits)
        return module

    return prepare


@pytest.mark.parametrize(
    ("sets", "error", "message"),
    [
        ({}, ValueError, "validation={}: expected at least one data set, or null"),
        ({"a/b": ROWS}, ValueError, "validation: 'a/b': expected a name of letters, digits"),
        ({"a": None}, ConfigError, "data.validation.a=None: expected a .jsonl"),
        ({"a": ROWS, "b": "none.jsonl"}, DataError, "data.validation.b='none.jsonl': no such file"),
        ({"a": [{"text": "1"}]}, DataError, "data.validation.a, row 1: data.prompt_column"),
    ],
)
def test_bad_validation_sets(prepare: Prepare, sets: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error) as raised:
        prepare(PromptDataModule(ROWS, sets))
    assert str(raised.value).startswith(message)


def test_a_task_fills_in_what_is_not_given(prepare: Prepare) -> None:
    task = RunningSum(train_size=20, validation_size=10)
    both = prepare(PromptDataModule(task=task))
    assert [p.text for p in both.train_dataloader().prompts] == [r["prompt"] for r in task.rows("train")]
    mixed = prepare(PromptDataModule(ROWS, task=task))
    assert len(mixed.train_dataloader().prompts) == len(ROWS)
    assert [p.text for p in mixed.val_dataloader().prompts] == [r["prompt"] for r in task.rows("validation")]


def test_a_step_that_wants_more_prompts_than_there_are_is_said(
    prepare: Prepare, caplog: pytest.LogCaptureFixture
) -> None:
    prepare(PromptDataModule(ROWS, prompts_per_step=len(ROWS))).warn()
    assert caplog.messages == []
    prepare(PromptDataModule(ROWS, prompts_per_step=8)).warn()
    assert caplog.messages == ["data.prompts_per_step=8: the training data has only 7 prompts, so each step has 7"]
    caplog.clear()
    prepare(PromptDataModule(ROWS[:1], prompts_per_step=8)).warn()
    assert caplog.messages == ["data.prompts_per_step=8: the training data has only 1 prompt, so each step has 1"]


def test_columns_are_those_of_every_prompt(prepare: Prepare) -> None:
    rows = [{"prompt": "1", "answer": "1", "id": "a", "x": 2}, {"prompt": "2", "x": 1, "answer": "2"}, *ROWS]
    assert columns_of(prepare(PromptDataModule(rows[:2])).prompts)[0] == ["answer", "x"]
    assert columns_of(prepare(PromptDataModule(rows)).prompts)[0] == []
    assert columns_of(PromptDataModule(rows).prompts)[0] == []


def test_a_column_that_some_rows_lack_has_the_place_of_the_first(prepare: Prepare) -> None:
    rows = [{"prompt": "1", "answer": "1", "x": 2}, {"prompt": "2", "x": 1}, {"prompt": "3", "x": 1}]
    module = prepare(PromptDataModule(rows, [{"prompt": "1", "answer": "1"}]))
    assert columns_of(module.prompts) == ([], {"answer": "data.train, row 2", "x": "data.validation, row 1"})
    assert columns_of(prepare(PromptDataModule(rows[:1])).prompts)[1] == {}


def test_no_training_data_is_refused(prepare: Prepare) -> None:
    with pytest.raises(ConfigError, match=r"data\.train=None: expected"):
        prepare(PromptDataModule(validation=ROWS))


def test_more_validation_prompts_than_rows_is_refused(prepare: Prepare) -> None:
    with pytest.raises(ConfigError, match=r"data\.validation_prompts=5: expected at most 4"):
        prepare(PromptDataModule(ROWS, ROWS[:4], validation_prompts=5))


@pytest.mark.parametrize("name", ["prompts_per_step", "validation_prompts", "max_prompt_tokens"])
def test_numbers_below_one_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}=0: expected at least 1"):
        PromptDataModule(ROWS, **{name: 0})


def test_arguments_are_kept_under_their_names() -> None:
    names = list(inspect.signature(PromptDataModule).parameters)
    given = {**dict.fromkeys(names), "train": ROWS, "prompts_per_step": 5, "seed": 9, "shuffle": False}
    module = PromptDataModule(**given)
    assert {name: getattr(module, name) for name in names} == given
