"""A run directory of somebody else's: an error in words, soon, and without the machine's memory."""

from __future__ import annotations

import gzip
import json
import resource
from pathlib import Path

import pytest

from rhymerl.errors import ConfigError, DataError
from rhymerl.history.traces import read_trace
from rhymerl.report import steps
from rhymerl.report.reading import read_run
from rhymerl.report.steps import STEPS, read_steps
from rhymerl.runs.model_card import _read
from tests.report.directories import make_run

BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 10)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "theirs")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (BOMB, "it has aliases"),
        ("seed: " + "${" * 50_000, None),
        ("seed: " + "[" * 50_000, "."),
        ("a: " + "x" * 2**20, "larger than 1 MiB"),
        ("- seed", "expected a mapping"),
        ("seed: \x00", "special characters"),
    ],
    ids=["aliases", "interpolations", "nesting", "size", "list", "control"],
)
def test_settings(run: Path, text: str, words: str | None):
    (run / "config.yaml").write_text(text)
    if words is None:
        assert read_run(run).settings["seed"] == text.removeprefix("seed: ")
        return
    with pytest.raises(ConfigError, match=rf"config\.yaml: cannot be read: .*{words}"):
        read_run(run)


def changed(run: Path, **values: object) -> None:
    """Give the first step other values."""
    records = list(read_steps(run / STEPS))
    first = next(each for each in records if "metrics" in each)
    lines = [json.dumps({**each, **values} if each is first else each) for each in records]
    (run / STEPS).write_bytes(gzip.compress("\n".join(lines).encode() + b"\n"))


@pytest.mark.parametrize(
    "values",
    [
        {"epoch": 2**31},
        {"epoch": 2**30},
        {"epoch": -1},
        {"step": 10**18},
        {"metrics": [1]},
        {"metrics": {"reward": 10**400}},
        {"answers": {"reward": [1.0]}},
        {"spans": 5},
    ],
    ids=str,
)
def test_steps(run: Path, values: dict[str, object]):
    """`export` goes on without the curves."""
    changed(run, **values)
    with pytest.raises(DataError, match=r"steps\.jsonl\.gz: is not what a run writes there"):
        read_run(run)
    assert _read(run) is None


def test_answers_that_no_column_holds(run: Path):
    answers = next(each["answers"] for each in read_steps(run / STEPS) if "answers" in each)
    changed(run, answers={**answers, "tokens": [2**40] * len(answers["tokens"])})
    with pytest.raises(DataError, match="is not what a run writes there"):
        read_run(run)


@pytest.mark.parametrize("name", ["config.yaml", "summary.json", STEPS])
def test_deep_nesting(run: Path, name: str):
    text = b"[" * 100_000
    (run / name).write_bytes(gzip.compress(text) if name == STEPS else text)
    with pytest.raises((ConfigError, DataError), match="cannot be read"):
        read_run(run)


def test_a_line_without_an_end_is_not_read_whole(run: Path, monkeypatch: pytest.MonkeyPatch):
    """64 MiB of blanks, which a small file holds."""
    monkeypatch.setattr(steps, "_LONGEST_LINE_BYTES", 2**20)
    (run / STEPS).write_bytes(gzip.compress(b" " * 2**26, compresslevel=9))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(DataError, match=r"steps\.jsonl\.gz: line 0: cannot be read: longer than 1 MiB"):
        read_run(run)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**15  # KiB: less than half of the line


def test_a_trace(tmp_path: Path):
    path = tmp_path / "trace.jsonl"
    path.write_text("[" * 100_000 + "\n")
    with pytest.raises(DataError, match="line 1: not valid JSON"):
        list(read_trace(path))


TURN = {"start": 1, "stop": 2, "tools": [], "reward": None, "waited_s": 0.5}


@pytest.mark.parametrize(
    "turns", [5, [5], [{}], [{**TURN, "start": "x"}], [{**TURN, "tools": 5}], [{**TURN, "reward": 10**400}]], ids=str
)
def test_turns(run: Path, turns: object):
    texts = next(each["texts"] for each in read_steps(run / STEPS) if "texts" in each)
    changed(run, texts=[{**texts[0], "turns": turns, "finish_reason": "stop"}])
    with pytest.raises(DataError, match="is not what a run writes there"):
        read_run(run)
