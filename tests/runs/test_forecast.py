"""What a run says after its first pass about the drafts of the following ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rhymerl.budgets import FixedBudget
from rhymerl.drafters import HistoryTreeDrafter
from rhymerl.history.traces import TraceRecord, read_trace
from rhymerl.runs.forecast import forecast
from rhymerl.runs.replay import Replay

TRACE = Path(__file__).parents[2] / "benchmarks" / "traces" / "running_sum.jsonl.gz"


def records(make_answer, *, prompts=8, samples=4):
    return [
        TraceRecord(
            epoch=0,
            prompt_id=str(prompt),
            sample=sample,
            prompt_tokens=np.array([prompt, 1], np.int32),
            response_tokens=np.asarray(make_answer(prompt, sample), np.int32),
            reward=0.0,
            finish_reason="stop",
        )
        for prompt in range(prompts)
        for sample in range(samples)
    ]


def test_equal_answers_are_expected_to_be_drafted_whole():
    # 27 tokens by passes of 8 drafted ones and 1: the first node follows the prompt.
    found = forecast(records(lambda prompt, sample: range(100 * prompt + 100, 100 * prompt + 127)))
    assert found.tokens_per_pass == pytest.approx(9.0)
    assert found.similarity == pytest.approx(24 / 27)  # the first 3 never match
    assert str(found) == "Answers to a prompt repeat 89% of each other: drafts should reach an acceptance length of 9.0"


def test_answers_without_anything_in_common_are_expected_to_be_drafted_hardly_at_all():
    random = np.random.default_rng(0)
    found = forecast(records(lambda prompt, sample: random.integers(0, 10**6, 27)))
    assert found.tokens_per_pass == pytest.approx(1.0)
    assert str(found) == "Answers to a prompt repeat 0% of each other: drafts will hardly pay yet"


def test_too_few_answers_to_tell():
    assert forecast(records(lambda prompt, sample: [1, 2, 3], prompts=3)) is None
    assert forecast(records(lambda prompt, sample: [1, 2, 3], prompts=40, samples=1)) is None


def test_the_second_epoch_of_a_recorded_run_is_as_the_first_one_says():
    trace = [each for each in read_trace(TRACE) if each.epoch < 2]
    said = forecast([each for each in trace if each.epoch == 0]).tokens_per_pass
    drafter = HistoryTreeDrafter(deterministic=True)
    had = Replay(drafter, FixedBudget(8), from_epoch=1).run(trace)[1].result()
    drafter.close()
    assert said == pytest.approx(had["tokens_per_pass"], rel=0.15)
