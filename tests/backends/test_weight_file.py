"""One file of weights for several engines."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from rhymerl.backends.remote.weights import SharedWeightFile


class Writer:
    def __init__(self, content: str) -> None:
        self.content, self.count = content, 0

    def __call__(self, path: Path) -> None:
        self.count += 1
        path.write_text(self.content)


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Where engines look for their weights."""
    for number in range(3):
        (tmp_path / str(number)).mkdir()
    return [tmp_path / str(number) / "model.safetensors" for number in range(3)]


def left(files: list[Path]) -> list[str]:
    return [path.name for file in files for path in file.parent.iterdir()]


def test_the_first_writes_and_the_others_link(files):
    shared, write = SharedWeightFile(3), Writer("one")
    threads = [threading.Thread(target=shared.put, args=(file, 1, write)) for file in files]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert write.count == 1
    assert [file.read_text() for file in files] == ["one"] * 3
    assert len({file.stat().st_ino for file in files}) == 1
    assert left(files) == ["model.safetensors"] * 3


def test_it_stays_for_those_that_come_late_until_there_are_newer_weights(files):
    shared, one, two = SharedWeightFile(3), Writer("one"), Writer("two")
    shared.put(files[0], 1, one)
    files[0].unlink()  # loaded
    shared.put(files[1], 1, one)
    assert (one.count, files[1].read_text()) == (1, "one")
    files[1].unlink()
    shared.put(files[0], 2, two)
    shared.put(files[1], 2, two)
    assert two.count == 1
    shared.put(files[2], 1, one)  # it has not heard of the newer ones yet
    assert (one.count, files[2].read_text()) == (2, "one")
    files[2].unlink()
    shared.put(files[2], 2, two)
    assert (two.count, files[2].read_text()) == (1, "two")
    assert left(files) == ["model.safetensors"] * 3


def test_one_whose_folder_is_gone_is_written_again(files):
    shared, write = SharedWeightFile(3), Writer("one")
    shared.put(files[0], 1, write)
    for path in files[0].parent.iterdir():
        path.unlink()
    shared.put(files[1], 1, write)
    assert (write.count, files[1].read_text()) == (2, "one")


def test_one_engine_keeps_nothing(files):
    SharedWeightFile(1).put(files[0], 1, Writer("one"))
    assert left(files) == ["model.safetensors"]
