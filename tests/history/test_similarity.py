from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rhymerl.history.similarity import length_stability, similarity
from rhymerl.history.traces import TraceRecord, read_trace
from tests.bytecodes import bytecodes

TRACES = Path(__file__).parents[2] / "benchmarks" / "traces"
RUNNING_SUM, LONG_SUM = TRACES / "running_sum.jsonl.gz", TRACES / "long_sum.jsonl.gz"


def record(epoch: int, prompt_id: str, tokens: Sequence[int]) -> TraceRecord:
    return TraceRecord(
        epoch=epoch,
        prompt_id=prompt_id,
        sample=0,
        prompt_tokens=np.array([1], np.int32),
        response_tokens=np.array(tokens, np.int32),
        reward=0.0,
        finish_reason="stop",
    )


def walk(answer: list[int], earlier: list[list[int]]) -> int:
    """Matched tokens, by the words of the definition."""
    location = num_matched = 0
    while location < len(answer):
        runs = [
            common(answer[location:], other[start:])
            for other in earlier
            for start in range(3, len(other))
            if location >= 3 and other[start - 3 : start] == answer[location - 3 : location]
        ]
        longest = max(runs, default=0)
        num_matched += longest
        location += longest or 1
    return num_matched


def common(left: list[int], right: list[int]) -> int:
    return next((n for n, (a, b) in enumerate(zip(left, right)) if a != b), min(len(left), len(right)))  # noqa: B905


records = st.builds(
    record, st.integers(0, 3), st.sampled_from("pq"), st.lists(st.sampled_from([0, 1, 2**31 - 1]), max_size=12)
)


@given(st.lists(records, max_size=12))
def test_similarity_is_that_of_the_walk(listed: list[TraceRecord]) -> None:
    found, matched, total = similarity(listed), {}, {}
    for each in listed:
        earlier = [
            other.response_tokens.tolist()
            for other in listed
            if (other.epoch, other.prompt_id) == (each.epoch - 1, each.prompt_id)
        ]
        if earlier:
            matched[each.epoch] = matched.get(each.epoch, 0) + walk(each.response_tokens.tolist(), earlier)
            total[each.epoch] = total.get(each.epoch, 0) + len(each.response_tokens)
    shares = {epoch: matched[epoch] / total[epoch] if total[epoch] else math.nan for epoch in total}
    assert found.by_epoch == pytest.approx(shares, nan_ok=True)
    expected = sum(matched.values()) / sum(total.values()) if sum(total.values()) else math.nan
    assert found.overall == pytest.approx(expected, nan_ok=True)


def test_similarity_by_hand() -> None:
    before, now = [1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 9, 4, 5, 6, 7]
    assert similarity([record(0, "p", before), record(1, "p", now)]).overall == 1 / 9  # the 4 after 1, 2, 3
    assert similarity([record(0, "p", before), record(1, "p", before)]).overall == 3 / 6
    assert math.isnan(similarity([record(0, "p", before), record(1, "q", before)]).overall)
    assert math.isnan(similarity([record(0, "p", before), record(2, "p", before)]).overall)


def lengths(epoch: int, *by_prompt: int) -> list[TraceRecord]:
    return [record(epoch, str(prompt), [0] * length) for prompt, length in enumerate(by_prompt)]


def test_length_stability_by_hand() -> None:
    found = length_stability(lengths(0, 1, 2, 3, 4) + lengths(1, 1, 2, 4, 3), num_groups=2)
    assert found.same_group_by_epoch == {1: 1.0}
    assert found.spearman == pytest.approx(1 - 6 * 2 / (4 * 15))
    found = length_stability(lengths(0, 1, 2, 3, 4) + lengths(1, 4, 3, 2, 1), num_groups=4)
    assert (found.same_group, found.spearman) == (0, -1)


def test_lengths_that_tell_nothing_have_no_correlation() -> None:
    found = length_stability(lengths(0, 5, 5) + lengths(1, 5, 6) + lengths(2, 5, 6) + lengths(4, 5, 6))
    assert found.spearman_by_epoch == pytest.approx({1: math.nan, 2: 1}, nan_ok=True)
    assert (found.spearman, found.same_group_by_epoch) == (pytest.approx(1), {1: 0.0, 2: 1.0})
    assert math.isnan(length_stability([]).same_group)


def test_length_is_the_median_of_the_answers_of_both_epochs_prompts() -> None:
    first = [record(0, "p", [0] * n) for n in (1, 1, 90)] + [record(0, "q", [0] * 2), record(0, "gone", [])]
    found = length_stability([*first, *[record(1, prompt, [0] * n) for prompt, n in (("p", 1), ("q", 2), ("new", 3))]])
    assert (found.same_group, found.spearman) == (1, pytest.approx(1))


@given(st.lists(st.integers(0, 5), min_size=2, max_size=9), st.lists(st.integers(0, 5), min_size=9, max_size=9))
def test_ranks_are_what_sorting_gives(before: list[int], now: list[int]) -> None:
    now = now[: len(before)]
    ranks = [[sum(b < a for b in each) + (each.count(a) - 1) / 2 for a in each] for each in (before, now)]
    found = length_stability(lengths(0, *before) + lengths(1, *now))
    same = [int(r * 8 // len(now)) == int(q * 8 // len(now)) for r, q in zip(*ranks, strict=True)]
    assert found.same_group == pytest.approx(sum(same) / len(same))
    if np.std(ranks, axis=1).all():
        assert found.spearman == pytest.approx(np.corrcoef(ranks)[0, 1])


def test_the_sample_trace_repeats_itself() -> None:
    listed = list(read_trace(RUNNING_SUM))
    found, stable = similarity(listed), length_stability(listed)
    assert (round(found.overall, 4), round(stable.same_group, 4), round(stable.spearman, 4)) == (0.7381, 0.9698, 0.9966)
    assert list(found.by_epoch) == list(stable.spearman_by_epoch) == list(range(1, 16))


def test_little_is_done_for_each_record() -> None:
    listed = list(islice(read_trace(RUNNING_SUM), 4096))
    assert bytecodes(lambda: (similarity(listed), length_stability(listed))) < 300 * len(listed)


def test_the_trace_of_long_sums_is_what_its_readme_says() -> None:
    """It has a long tail of lengths, which comes from the prompts, and its policy learns."""
    listed = list(read_trace(LONG_SUM))
    by_epoch = [
        sorted((each for each in listed if each.epoch == epoch), key=lambda each: (each.prompt_id, each.sample))
        for epoch in range(8)
    ]
    answers = np.array([[len(each.response_tokens) for each in epoch] for epoch in by_epoch])
    assert answers.shape == (8, 64 * 8)
    assert (round(answers.mean()), *np.percentile(answers, [50, 99], method="lower"), answers.max()) == (
        79,
        64,
        295,
        448,
    )
    assert round(np.corrcoef(answers[:-1].ravel(), answers[1:].ravel())[0, 1], 2) == 0.79
    stable = length_stability(listed)
    assert (round(stable.spearman, 2), round(stable.same_group, 2)) == (0.99, 0.93)
    assert round(similarity(listed).overall, 2) == 0.78
    assert [round(np.mean([each.reward for each in by_epoch[epoch]]), 2) for epoch in (0, 7)] == [0.41, 0.64]
