"""The file that says what each step did: whole lines, whatever happens."""

from __future__ import annotations

import gzip
import logging
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rhymerl.errors import DataError
from rhymerl.report.steps import StepFile, read_steps, source_runs


@given(st.lists(st.integers(-2, 5), max_size=30))
def test_source_runs_are_those_of_groupby(sources):
    expected = [(len(list(group)), source) for source, group in groupby(sources)]
    assert source_runs(np.array(sources, np.int8)) == expected


def test_a_run_that_goes_on_leaves_the_bytes_of_one_that_was_never_interrupted(tmp_path: Path):
    whole, broken = StepFile(tmp_path / "whole.gz"), StepFile(tmp_path / "broken.gz")
    for step in range(5):
        whole.append({"step": step})
    for step in range(4):
        broken.append({"step": step})
        if step == 1:
            saved = broken.num_bytes
    resumed = StepFile(broken.path, num_bytes=saved)
    for step in range(2, 5):
        resumed.append({"step": step})
    assert broken.path.read_bytes() == whole.path.read_bytes()
    assert [each["step"] for each in read_steps(whole.path)] == [0, 1, 2, 3, 4]


def test_a_new_run_leaves_nothing_of_what_was_there(tmp_path: Path):
    (tmp_path / "a.gz").write_bytes(b"something else")
    file = StepFile(tmp_path / "a.gz")
    file.append({"step": 1})
    assert list(read_steps(file.path)) == [{"step": 1}]


def test_what_a_kill_has_cut_off_is_left_out(tmp_path: Path):
    file = StepFile(tmp_path / "a.gz")
    file.append({"step": 1})
    whole = file.num_bytes
    file.append({"step": 2})
    found = []
    for end in range(whole, file.num_bytes):
        cut = tmp_path / "cut.gz"
        cut.write_bytes(file.path.read_bytes()[:end])
        found.append(list(read_steps(cut)))
    assert found[:10] == [[{"step": 1}]] * 10
    # All of the line may be there before all of the member is.
    assert all(each in ([{"step": 1}], [{"step": 1}, {"step": 2}]) for each in found)


def test_a_file_that_somebody_has_removed_begins_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    file = StepFile(tmp_path / "a.gz", num_bytes=100)
    with caplog.at_level(logging.WARNING):
        file.append({"step": 7})
    assert "lacks what the run had written" in caplog.text
    assert list(read_steps(file.path)) == [{"step": 7}]


@pytest.mark.parametrize(
    "content",
    [b"no gzip at all", gzip.compress(b"no JSON\n"), gzip.compress(b"[1]\n")],
    ids=["no gzip", "no JSON", "no object"],
)
def test_a_corrupt_file_is_named(content, tmp_path: Path):
    path = tmp_path / "steps.jsonl.gz"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"steps\.jsonl\.gz: line \d: cannot be read"):
        list(read_steps(path))
