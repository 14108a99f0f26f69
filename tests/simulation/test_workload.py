"""Lengths, sampled and recorded."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from rhymerl.errors import DataError
from rhymerl.history.traces import TraceRecord, TraceWriter
from rhymerl.simulation import RecordedLengths, SyntheticLengths


def logs(works) -> np.ndarray:
    """[S, prompts, samples]"""
    return np.log(np.array([work.lengths for work in works], np.float64)).reshape(len(works), 256, 16)


def test_the_reference_workload():
    found = logs(SyntheticLengths(cap=10**9).steps(20, 0))
    assert np.exp(found).mean() == pytest.approx(5300, rel=0.05)
    assert found.std(axis=2, ddof=1).mean() == pytest.approx(0.35, rel=0.03)
    assert found.mean(axis=2).std() == pytest.approx(0.7, rel=0.05)
    cut = SyntheticLengths().steps(20, 0)
    assert max(work.lengths.max() for work in cut) == 16384
    assert 0.005 < np.mean([work.is_cut.mean() for work in cut]) < 0.05
    assert all((work.lengths[work.is_cut] == 16384).all() for work in cut)


def test_epochs_ask_the_same_prompts_and_draw_anew():
    works = SyntheticLengths(steps_per_epoch=3).steps(7, 0)
    assert works[0].requests is works[3].requests is works[6].requests
    assert len({request.id for work in works[:3] for request in work.requests}) == 3 * 256 * 16
    assert works[0].lengths.tolist() != works[3].lengths.tolist()
    means = logs(works).mean(axis=2)
    assert np.corrcoef(means[0], means[3])[0, 1] > 0.95
    assert abs(np.corrcoef(means[0], means[1])[0, 1]) < 0.2


@pytest.mark.parametrize("correlation", [0.0, 0.6])
def test_prompts_change_from_epoch_to_epoch(correlation):
    source = SyntheticLengths(steps_per_epoch=1, rank_correlation=correlation, cap=10**9, within=0.01)
    means = logs(source.steps(12, 3)).mean(axis=2)
    found = np.mean([np.corrcoef(one, two)[0, 1] for one, two in pairwise(means)])
    assert found == pytest.approx(correlation, abs=0.06)
    assert means.std() == pytest.approx(0.7, rel=0.08)


def test_lengths_grow():
    means = logs(SyntheticLengths(growth=0.1, cap=10**9).steps(11, 0)).mean(axis=(1, 2))
    assert means[10] - means[0] == pytest.approx(10 * np.log(1.1), abs=0.15)


def record(epoch: int, prompt: str, length: int, reason: str = "stop") -> TraceRecord:
    return TraceRecord(
        epoch=epoch,
        prompt_id=prompt,
        sample=0,
        prompt_tokens=np.array([1], np.int32),
        response_tokens=np.zeros(length, np.int32),
        reward=0.0,
        finish_reason=reason,  # type: ignore[arg-type]
    )


def test_recorded_lengths_go_by_epoch_and_prompt(tmp_path: Path):
    with TraceWriter(tmp_path / "trace.jsonl") as writer:
        writer.write(
            [record(0, "a", 3), record(0, "b", 5), record(0, "a", 4), record(0, "c", 9, "length"), record(1, "a", 2)]
        )
    works = RecordedLengths(tmp_path / "trace.jsonl", prompts_per_step=2).steps(10, 0)
    assert [[request.id for request in work.requests] for work in works] == [["a/0", "a/1", "b/0"], ["c/0"], ["a/0"]]
    assert [work.lengths.tolist() for work in works] == [[3, 4, 5], [9], [2]]
    assert [work.is_cut.tolist() for work in works] == [[False] * 3, [True], [False]]
    assert len(RecordedLengths(tmp_path / "trace.jsonl", prompts_per_step=2).steps(2, 0)) == 2


@pytest.mark.parametrize("has_seconds", [True, False])
def test_recorded_waits_are_those_of_all_turns(tmp_path: Path, caplog, has_seconds):
    waits = {"a": np.array([0.5, 1.0, 0.0]), "b": None}
    with TraceWriter(tmp_path / "trace.jsonl") as writer:
        writer.write(replace(record(0, prompt, 9), waits=each) for prompt, each in waits.items())
    source = RecordedLengths(tmp_path / "trace.jsonl", prompts_per_step=2, has_seconds=has_seconds)
    (work,) = source.steps(1, 0)
    if has_seconds:
        assert (work.turns.tolist(), work.waits.tolist()) == ([3, 1], [1.5, 0.0])
    else:
        assert (work.turns, work.waits) == (None, None)
    assert ("costs=FILE" in caplog.text) is not has_seconds


def test_what_is_no_workload(tmp_path: Path):
    for name, value in (
        ("prompts_per_step", 0),
        ("cap", 0),
        ("within", -1.0),
        ("steps_per_epoch", 0),
        ("turns", 0),
        ("wait", -1.0),
    ):
        with pytest.raises(ValueError, match=rf"^{name}={value}: expected at least"):
            SyntheticLengths(**{name: value})
    with pytest.raises(ValueError, match=r"^rank_correlation=1.5: expected 0 to 1"):
        SyntheticLengths(rank_correlation=1.5)
    with pytest.raises(DataError, match="no such file$"):
        RecordedLengths(tmp_path / "nothing.jsonl", prompts_per_step=1)
