"""The answers of one run are the next one's drafts: the file that is left, what takes it up, and what refuses it."""

from __future__ import annotations

import json
import shutil
import signal
import struct
from pathlib import Path
from typing import Any

import pytest

from rhymerl.history import HistoryStore
from rhymerl.testing import tiny_policy
from tests.integration import programs
from tests.integration.conftest import Run, assert_same, checkpoint

NAME = "history.rhyme"
SEED_OF_DATA = "data.seed=0"  # the same prompts, whatever the run's seed


@pytest.fixture(scope="module")
def first_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("first") / "run"


@pytest.fixture
def words(settings: list[str]) -> list[str]:
    """Four steps: all prompts once, and some of them again."""
    return [*settings, "trainer.max_steps=8", "task.seed=0", SEED_OF_DATA]


@pytest.fixture
def first(first_dir: Path, words: list[str], rhymerl: Run) -> Path:
    """A finished run; made once."""
    if not first_dir.exists():
        assert rhymerl(*words, f"run_dir={first_dir}").code == 0
    return first_dir


def tokenizer_of(path: Path) -> str:
    """The fingerprint in the file's header."""
    content = path.read_bytes()
    _, _, num_bytes, _ = struct.unpack_from("<8sIII", content)
    return str(json.loads(content[20 : 20 + num_bytes])["tokenizer"])


def store_of(path: Path) -> HistoryStore:
    return HistoryStore.load(path, tokenizer=tokenizer_of(path), window=99)


def epochs_of(store: HistoryStore, split: str) -> set[int]:
    return {answer.epoch for change in store.snapshot() if change.split == split for answer in change.added}


def test_a_finished_run_leaves_its_history(first: Path) -> None:
    store = store_of(first / NAME)
    assert store.num_answers == (10 + 4) * 4 + 2 * 4  # training, and validation before and after
    assert (epochs_of(store, "train"), epochs_of(store, "validation")) == ({0, 1}, {0, 1})


def test_a_stopped_run_leaves_its_history_too(words: list[str], tmp_path: Path) -> None:
    stop = f"algo={{_target_: tests.integration.programs.DieInUpdate, call: 3, signal: {int(signal.SIGINT)}}}"
    process = programs.start([*words, f"run_dir={tmp_path / 'run'}", stop], tmp_path / "output")
    process.join(600)
    assert process.exitcode == 130
    store = store_of(tmp_path / "run" / NAME)
    assert sum(len(change.added) for change in store.snapshot() if change.split == "train") == 2 * 4 * 4
    epochs = {a.epoch for change in store.snapshot() if change.split == "validation" for a in change.added}
    assert epochs == {0}, "it was evaluated on its way out"


def test_the_next_run_drafts_from_it_from_its_first_step_on(words: list[str], tmp_path: Path, rhymerl: Run) -> None:
    """The noise is the same, so the first step's answers are those of the file: hardly anything is left to draw."""
    more = [*words, "trainer.max_steps=2", "rollout.temperature=0.5", "drafter.siblings=false", "drafter.own=false"]
    said, answers = {}, {}
    assert rhymerl(*more, f"run_dir={tmp_path / 'first'}").code == 0
    for name, file in (("without", []), ("with", [f"history_file={tmp_path / 'first' / NAME}"])):
        done = rhymerl(*more, *file, f"run_dir={tmp_path / name}")
        assert done.code == 0, done.err
        said[name] = done.out
        answers[name] = json.loads((tmp_path / name / "summary.json").read_text())
    assert answers["without"]["spec_accept_rate"] == 0
    assert answers["with"]["spec_accept_length"] > 1.5
    assert answers["with"]["reward_first"] == answers["without"]["reward_first"]
    assert "earlier answers" not in said["without"]
    assert f"from {tmp_path / 'first' / NAME}; 4 of 10 prompts have some" in said["with"].replace("\n", "")


def test_what_it_adds_is_newer_than_what_it_was_given(
    first: Path, words: list[str], tmp_path: Path, rhymerl: Run
) -> None:
    assert rhymerl(*words, f"history_file={first / NAME}", f"run_dir={tmp_path / 'run'}").code == 0
    store = store_of(tmp_path / "run" / NAME)
    assert (epochs_of(store, "train"), epochs_of(store, "validation")) == ({0, 1, 2, 3}, {0, 1, 2, 3})
    assert store.num_answers == 2 * ((10 + 4) * 4 + 2 * 4)


def test_a_resumed_run_has_its_own(first: Path, words: list[str], tmp_path: Path, rhymerl: Run) -> None:
    more = [
        *words,
        "drafter=none",
        "update.lr_schedule=constant",
    ]  # without drafts the weights are equal to the last bit
    file = tmp_path / NAME
    shutil.copy(first / NAME, file)
    assert rhymerl(*more, f"history_file={file}", f"run_dir={tmp_path / 'whole'}").code == 0
    assert rhymerl(*more, f"history_file={file}", f"run_dir={tmp_path / 'run'}", "trainer.max_steps=4").code == 0
    file.unlink()
    done = rhymerl(*more, f"history_file={file}", f"run_dir={tmp_path / 'run'}", "ckpt_path=last")
    assert done.code == 0, done.err
    assert "is not read: the checkpoint has the run's own history" in done.out.replace("\n", " ")
    one, two = (checkpoint(tmp_path / name) for name in ("run", "whole"))
    for each in (one, two):
        del each["rhymerl"]["logged"]  # times among others
    assert_same(one["rhymerl"], two["rhymerl"])
    assert_same(one["state_dict"], two["state_dict"])


def changed(content: bytes, index: int) -> bytes:
    return content[:index] + bytes([content[index] ^ 1]) + content[index + 1 :]


BROKEN: dict[str, tuple[Any, str]] = {
    "truncated": (lambda content: content[:-5], "truncated: it ends 5 bytes too early"),
    "empty": (lambda content: b"", "truncated"),
    "corrupt": (lambda content: changed(content, len(content) - 9), "corrupt: the checksum of its section"),
    "corrupt header": (lambda content: changed(content, 30), "corrupt: the checksum of its header differs"),
    "newer": (lambda content: content[:8] + struct.pack("<I", 9) + content[12:], "its format 9 is newer than"),
    "something else": (lambda content: b'{"prompt": 1}' + content, "not a history file"),
    "missing": (None, "cannot be read: No such file or directory"),
}


@pytest.mark.parametrize(
    "name", ["truncated", *(pytest.param(name, marks=pytest.mark.slow) for name in BROKEN if name != "truncated")]
)
def test_a_file_that_cannot_be_used(name: str, first: Path, words: list[str], tmp_path: Path, rhymerl: Run) -> None:
    change, message = BROKEN[name]
    file = tmp_path / "broken.rhyme"
    if change is not None:
        file.write_bytes(change((first / NAME).read_bytes()))
    assert_refused(file, message, words, tmp_path, rhymerl)


def test_a_directory_and_a_file_of_another_tokenizer(
    first: Path, words: list[str], tmp_path: Path, rhymerl: Run
) -> None:
    assert_refused(tmp_path, "cannot be read: Is a directory", words, tmp_path, rhymerl)
    other = tiny_policy(dtype="float32", context=128)
    other.tokenizer.add_tokens(["12"])
    other.model.resize_token_embeddings(len(other.tokenizer))
    other.save(tmp_path / "model")
    message = "its token ids are those of the tokenizer"
    assert_refused(first / NAME, message, [*words, f"model.path={tmp_path / 'model'}"], tmp_path, rhymerl)


def assert_refused(file: Path, message: str, words: list[str], tmp_path: Path, rhymerl: Run) -> None:
    """One line before any compute; and when the file need not be, a run that says so."""
    words = [*words, f"history_file={file}", f"run_dir={tmp_path / 'run'}"]
    done = rhymerl(*words)
    assert done.code == 2
    assert done.err.startswith(f"error: history file '{file}': ")
    assert message in done.err
    assert "or set history_file_required=false to start without it" in done.err
    assert done.err.count("\n") == 1
    assert done.out == ""
    assert not any((tmp_path / "run").glob("*"))
    done = rhymerl(*words, "history_file_required=false", "trainer.max_steps=2")
    assert done.code == 0, done.err
    assert f"Starting without earlier answers: history file '{file}': " in done.out.replace("\n", "")
    shutil.rmtree(tmp_path / "run")
