"""The columns of answers, against the answers one by one."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rhymerl.report.answers import AnswerColumns, Answers, ratios
from rhymerl.report.samples import sample_data

ANSWERS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 4)), min_size=1, max_size=25)


def record(step: int, epoch: int, answers: list[tuple[int, int]], *, texts: bool = False):
    """Answers are pairs of a prompt and a reward."""
    rewards = [reward for _, reward in answers]
    text = {"prompt": "p", "text": "t", "runs": None, "rewards": {}, "advantage": None}
    return {
        "step": step,
        "epoch": epoch,
        "answers": {
            "prompt_id": [f"p{prompt}" for prompt, _ in answers],
            "reward": rewards,
            **{name: list(range(len(answers))) for name in ("sample", "tokens", "passes", "drafted", "accepted")},
            "is_cut": [0] * len(answers),
        },
        "texts": [{"answer": index, **text} for index in range(len(answers))] if texts else [],
    }


def answers_of(records: Iterable[dict[str, Any]]) -> Answers:
    columns = AnswerColumns()
    for each in records:
        columns.add(each)
    answers = columns.whole()
    assert answers is not None
    return answers


@given(ANSWERS)
def test_the_change_is_that_of_the_mean_since_the_prompt_was_here_before(rows):
    answers = answers_of(record(1, epoch, [(prompt, reward)]) for epoch, prompt, reward in rows)
    for index, (epoch, prompt, _) in enumerate(rows):
        rewards = {e: [r for e2, p2, r in rows if (e2, p2) == (e, prompt)] for e in range(epoch + 1)}
        means = [np.mean(rewards[e]) for e in range(epoch + 1) if rewards[e]]
        expected = means[-1] - means[-2] if len(means) > 1 else math.nan
        assert answers.change[index] == pytest.approx(expected, nan_ok=True)


def test_rates_by_epoch_are_those_of_the_sums():
    answers = answers_of([record(1, 0, [(0, 1)] * 3), record(2, 2, [(0, 1)] * 4)])
    assert ratios(answers.epoch, answers.accepted, answers.drafted) == {0: 1.0, 2: 1.0}
    assert ratios(answers.epoch, answers.reward, answers.tokens) == {0: 3 / (0 + 1 + 2), 2: 4 / (0 + 1 + 2 + 3)}


def test_of_many_answers_some_steps_are_shown_the_last_one_among_them():
    answers = answers_of(record(step, step, [(0, step)] * 10) for step in range(1, 31))
    data = sample_data(answers, max_answers=100, max_texts=5)
    steps = sorted(set(data["columns"]["step"]))
    assert data["num_answers"] == 300
    assert len(data["columns"]["step"]) == 100
    assert steps == list(range(3, 31, 3))
    assert data["columns"]["change"][:10] == [1.0] * 10


def test_texts_are_shown_of_whole_prompts():
    records = [record(step, step, [(prompt, 1) for prompt in range(6)], texts=True) for step in range(1, 6)]
    answers = answers_of(records)
    data = sample_data(answers, max_answers=1_000, max_texts=17)
    prompts = [data["columns"]["prompt"][row] for row in data["text_rows"]]
    assert len(data["texts"]) == 15
    assert {prompt: prompts.count(prompt) for prompt in set(prompts)} == {0: 5, 1: 5, 2: 5}


def test_a_single_long_group_is_cut_to_what_there_is_room_for():
    answers = answers_of([record(1, 0, [(0, 1)] * 50, texts=True)])
    assert len(sample_data(answers, max_answers=20, max_texts=9)["texts"]) == 9
    assert len(sample_data(answers, max_answers=20, max_texts=9)["columns"]["step"]) == 20
