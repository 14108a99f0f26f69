from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rhymerl.errors import DataError
from rhymerl.history import HistoryStore
from rhymerl.history import files as history_files
from rhymerl.history.files import read_sections, write_sections
from tests.history.answers import answer, prompt


def store() -> HistoryStore:
    made = HistoryStore()
    made.add(prompt("a"), [answer(sample=0), answer(sample=1, finish_reason="length", reward=float("nan"))])
    made.add(prompt("ä", [300_000]), [answer(epoch=3, token_ids=[])], "validation")
    return made


@pytest.fixture
def path(tmp_path: Path) -> Path:
    store().save(tmp_path / "history.bin", "tokenizer-1")
    return tmp_path / "history.bin"


def test_a_file_gives_back_what_was_saved(path: Path) -> None:
    loaded = HistoryStore.load(path, tokenizer="tokenizer-1", window=4)
    loaded.check_integrity()
    assert loaded.window == 4
    assert loaded.state_dict() == store().state_dict()
    assert os.listdir(path.parent) == [path.name]


def test_the_same_history_is_the_same_file(path: Path) -> None:
    before = path.read_bytes()
    HistoryStore.load(path, tokenizer="tokenizer-1").save(path, "tokenizer-1")
    assert path.read_bytes() == before


BREAKS: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda data: b"", "truncated: it ends 20 bytes too early"),
    "in the prefix": (lambda data: data[:10], "truncated: it ends 10 bytes too early"),
    "in the header": (lambda data: data[:40], "truncated: it ends .* bytes too early"),
    "in a section": (lambda data: data[:-1], "truncated: it ends 1 bytes too early"),
    "header changed": (lambda data: data[:30] + b"?" + data[31:], "corrupt: the checksum of its header differs"),
    "token changed": (lambda data: data[:-1] + b"\7", "corrupt: the checksum of its section 'tokens' differs"),
    "more behind": (lambda data: data + b"x", "corrupt: it goes on after its last section"),
    "newer": (lambda data: data[:8] + b"\2" + data[9:], "its format 2 is newer than 1"),
    "older": (lambda data: data[:8] + b"\0" + data[9:], "corrupt: the checksum of its header differs"),
    "something else": (lambda data: b"PK\3\4" + data, "not a history file"),
}


@pytest.mark.parametrize(("change", "message"), BREAKS.values(), ids=BREAKS)
def test_a_broken_file_is_named(path: Path, change: Callable[[bytes], bytes], message: str) -> None:
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(DataError, match=f"^history file '{path}': {message}") as caught:
        HistoryStore.load(path, tokenizer="tokenizer-1")
    assert "\n" not in str(caught.value)


def test_another_tokenizer_is_refused(path: Path) -> None:
    with pytest.raises(DataError, match=r"history\.bin': .* of the tokenizer 'tokenizer-1', but this run has 'other'"):
        HistoryStore.load(path, tokenizer="other")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"^history file '.*none\.bin': cannot be read: No such file"):
        HistoryStore.load(tmp_path / "none.bin", tokenizer="")
    with pytest.raises(DataError, match=r"^history file '.*none/x\.bin': cannot be written: No such file"):
        store().save(tmp_path / "none" / "x.bin", "")


def test_sections_that_do_not_fit_together_are_refused(path: Path) -> None:
    sections = {name: bytearray(data) for name, data in read_sections(path, tokenizer="tokenizer-1").items()}
    write_sections(path, {**sections, "tokens": bytearray(4)}, tokenizer="tokenizer-1")
    with pytest.raises(DataError, match=r"history\.bin': corrupt: its column 'tokens' has 1 entries instead of 6"):
        HistoryStore.load(path, tokenizer="tokenizer-1")


@given(data=st.data())
def test_no_changed_bit_and_no_cut_goes_unnoticed(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("history") / "history.bin"
    store().save(path, "tokenizer-1")
    content = bytearray(path.read_bytes())
    position = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        content = content[:position]
    else:
        content[position] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(content)
    with pytest.raises(DataError):
        HistoryStore.load(path, tokenizer="tokenizer-1")


def with_header(content: bytes) -> bytes:
    """A file with this header, whose checksum is right, and nothing behind it."""
    return struct.pack("<8sIII", b"rhymehis", 1, len(content), zlib.crc32(content)) + content


CRAFTED = {
    "no JSON": b"{",
    "no object": b"[1, 2]",
    "no sections": b'{"tokenizer": "tokenizer-1"}',
    "sections of another kind": b'{"tokenizer": "tokenizer-1", "sections": 3}',
    "sections too short": b'{"tokenizer": "tokenizer-1", "sections": [["names", 3]]}',
    "a negative length": b'{"tokenizer": "tokenizer-1", "sections": [["names", -1, 0]]}',
    "a length that is no number": b'{"tokenizer": "tokenizer-1", "sections": [["names", "3", 0]]}',
    "more than there is memory": b'{"tokenizer": "tokenizer-1", "sections": [["names", 9007199254740991, 0]]}',
    "a name that is a list": b'{"tokenizer": "tokenizer-1", "sections": [[["names"], 0, 0]]}',
    "the same section twice": b'{"tokenizer": "tokenizer-1", "sections": [["names", 0, 0], ["names", 0, 0]]}',
    "a tokenizer that is none": b'{"tokenizer": null, "sections": []}',
    "nested too deeply": b"[" * 100_000,
    "not UTF-8": b"\xff\xfe",
}


@pytest.mark.parametrize("content", CRAFTED.values(), ids=CRAFTED)
def test_a_header_that_somebody_has_made_up_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "history.bin"
    path.write_bytes(with_header(content))
    with pytest.raises(DataError, match=f"^history file '{path}': (corrupt|truncated): "):
        HistoryStore.load(path, tokenizer="tokenizer-1")


@pytest.mark.parametrize("name", ["epochs", "samples", "policy_versions"])
def test_numbers_that_no_later_checkpoint_could_hold_are_refused(name: str, path: Path) -> None:
    sections = {key: bytearray(value) for key, value in read_sections(path, tokenizer="tokenizer-1").items()}
    sections[name][-8:] = struct.pack("<q", 2**63 - 1)
    write_sections(path, sections, tokenizer="tokenizer-1")
    with pytest.raises(DataError, match=f"its column '{name}' has a number that no run gets to"):
        HistoryStore.load(path, tokenizer="tokenizer-1")


def test_a_failed_write_leaves_the_old_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = path.read_bytes()

    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(history_files.os, "fsync", full)
    with pytest.raises(DataError, match="cannot be written: No space left on device"):
        HistoryStore().save(path, "tokenizer-1")
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == [path.name]
