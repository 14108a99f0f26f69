"""`record_rollouts=true`: a run's answers on file. That they are the same bytes after a kill is in test_resume.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rhymerl.history.traces import read_trace
from tests.integration.conftest import Run, checkpoint, made_once

NAME = "rollouts.jsonl.gz"
STEPS_A_PASS, NUM_PROMPTS, GROUP = 3, 10, 4


def words_for(settings: list[str], run_dir: Path, *more: str) -> list[str]:
    """Return the words of a command in float64, where tokens do not even follow the drafts."""
    return [*settings, "model.dtype=float64", "record_rollouts=true", f"run_dir={run_dir}", *more]


@pytest.fixture
def whole(whole_dir: Path, settings: list[str], rhymerl: Run) -> Path:
    """The run directory of an uninterrupted run of six steps; made once."""
    return made_once(whole_dir, words_for(settings, whole_dir), rhymerl)


def test_every_answer_by_pass_and_ready_for_replay(whole: Path, rhymerl: Run) -> None:
    records = list(read_trace(whole / NAME))
    indices = {(each.epoch, each.prompt_id, each.sample) for each in records}
    assert len(indices) == len(records) == 2 * NUM_PROMPTS * GROUP
    assert [each.epoch for each in records] == [0] * NUM_PROMPTS * GROUP + [1] * NUM_PROMPTS * GROUP
    num_tokens = sum(len(each.response_tokens) for each in records)
    assert num_tokens == json.loads((whole / "summary.json").read_text())["num_tokens"]
    done = rhymerl("replay", str(whole / NAME), "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["tokens"] == num_tokens


def test_going_on_elsewhere_records_what_comes(whole: Path, settings: list[str], tmp_path: Path, rhymerl: Run) -> None:
    first = tmp_path / "first"
    assert rhymerl(*words_for(settings, first, "trainer.max_steps=8", "update.lr_schedule=constant")).code == 0
    before = (first / NAME).read_bytes()
    words = words_for(settings, tmp_path / "second", "update.lr_schedule=constant")
    done = rhymerl(*words, f"ckpt_path={first / 'checkpoints' / 'last.ckpt'}")
    assert done.code == 0, done.err
    records = list(read_trace(tmp_path / "second" / NAME))
    assert {each.epoch for each in records} == {1}
    assert len(records) == (NUM_PROMPTS - 4) * GROUP
    assert (first / NAME).read_bytes() == before


def test_a_file_that_has_lost_something_is_refused(settings: list[str], tmp_path: Path, rhymerl: Run) -> None:
    words = words_for(settings, tmp_path / "run")
    assert rhymerl(*words, "trainer.max_steps=4").code == 0
    (tmp_path / "run" / NAME).write_bytes(b"")
    done = rhymerl(*words, "ckpt_path=last")
    assert done.code == 2
    assert f"trace '{tmp_path / 'run' / NAME}': has 0 bytes, but" in done.err
    assert checkpoint(tmp_path / "run")["rhymerl"]["num_rollouts"] == 2
