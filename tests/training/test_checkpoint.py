"""Files of checkpoints: no wrong bit goes unnoticed, and the newest whole one is found."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from rhymerl.callbacks import AtomicCheckpointIO
from rhymerl.errors import ConfigError
from rhymerl.training.checkpoint import FORMAT, damage, newest_first, newest_whole, read_checkpoint

STATE: dict[str, Any] = {
    "rhymerl": {"format": FORMAT, "num_rollouts": 3, "history": bytearray(b"answers" * 300)},
    "state_dict": {f"weight {i}": torch.arange(40 * i, 40 * i + 37 + i) / 7 for i in range(6)},
}


def saved(path: Path, state: Any = STATE) -> Path:
    AtomicCheckpointIO().save_checkpoint(state, path)
    return path


def flipped(content: bytes, bit: int) -> bytes:
    return content[: bit // 8] + bytes([content[bit // 8] ^ 1 << bit % 8]) + content[bit // 8 + 1 :]


def test_a_whole_file_is_read_from_the_disk(tmp_path: Path) -> None:
    path = saved(tmp_path / "step=3.ckpt")
    assert damage(path) is None
    read = read_checkpoint(path)
    assert all(torch.equal(read["state_dict"][name], weight) for name, weight in STATE["state_dict"].items())
    assert AtomicCheckpointIO().load_checkpoint(path, weights_only=True)["rhymerl"] == STATE["rhymerl"]


def test_every_wrong_bit_is_found(tmp_path: Path) -> None:
    """The bits are in records, in the names and places of records, and in what fills up the space between them."""
    content = saved(tmp_path / "step=3.ckpt").read_bytes()
    path = tmp_path / "wrong.ckpt"
    bits = random.Random(0).sample(range(8 * len(content)), 2000)
    unnoticed = []
    for bit in bits:
        path.write_bytes(flipped(content, bit))
        if damage(path) is None:
            unnoticed.append(bit)
    assert unnoticed == []


@pytest.mark.parametrize("cut", [0, 1, 21, 22, 23, 500, -1, -16, -17, -60])
def test_a_part_of_a_file_is_found(cut: int, tmp_path: Path) -> None:
    content = saved(tmp_path / "step=3.ckpt").read_bytes()
    (tmp_path / "cut.ckpt").write_bytes(content[:cut])
    assert damage(tmp_path / "cut.ckpt")
    (tmp_path / "longer.ckpt").write_bytes(content + b"x")
    assert damage(tmp_path / "longer.ckpt")


def test_files_of_torch_itself_are_looked_at_too(tmp_path: Path) -> None:
    """It leaves bytes between records that nothing vouches for; in the records every bit is found."""
    path = tmp_path / "theirs.ckpt"
    torch.save(STATE, path)
    assert damage(path) is None
    content = path.read_bytes()
    index = content.index(STATE["state_dict"]["weight 3"].numpy().tobytes())
    for bit in range(8 * index, 8 * index + 320):
        path.write_bytes(flipped(content, bit))
        assert damage(path) is not None


def test_a_damaged_file_says_which_older_one_is_whole(tmp_path: Path) -> None:
    paths = {step: saved(tmp_path / f"step={step}.ckpt") for step in (2, 10, 9)}
    (tmp_path / "last.ckpt").symlink_to("step=10.ckpt")
    content = paths[10].read_bytes()
    index = content.index(STATE["state_dict"]["weight 1"].numpy().tobytes())
    for step in (10, 9):
        paths[step].write_bytes(flipped(content, 8 * index))
    with pytest.raises(ConfigError) as caught:
        read_checkpoint(tmp_path / "last.ckpt")
    assert str(caught.value) == (
        f"ckpt_path={str(tmp_path / 'last.ckpt')!r}: not a checkpoint that can be read: the checksum of its record "
        f"'archive/data/1' differs; the newest whole one before it is {str(paths[2])!r}, which ckpt_path=auto takes"
    )
    newest, damaged = newest_whole(tmp_path)
    assert newest == paths[2]
    assert list(damaged) == [paths[10], paths[9]]
    paths[2].write_bytes(b"")
    with pytest.raises(ConfigError, match="no older one beside it is whole$"):
        read_checkpoint(paths[10])
    assert newest_whole(tmp_path)[0] is None
    with pytest.raises(ConfigError, match=r"step=9\.ckpt': not a checkpoint that can be read: the checksum"):
        AtomicCheckpointIO().load_checkpoint(paths[9])


def test_the_newest_is_what_last_names_and_what_came_before(tmp_path: Path) -> None:
    assert newest_first(tmp_path) == []
    for name in ("step=2", "step=10", "step=9", "step=x", "other", ".step=11"):
        (tmp_path / f"{name}.ckpt").write_bytes(b"")
    named = [tmp_path / f"step={step}.ckpt" for step in (10, 9, 2)]
    assert newest_first(tmp_path) == named
    (tmp_path / "last.ckpt").symlink_to("step=9.ckpt")
    assert newest_first(tmp_path) == named[1:], "it was taken back to an earlier one, from which step 10 does not come"
    (tmp_path / "step=9.ckpt").unlink()
    assert newest_first(tmp_path) == [named[0], named[2]]
    (tmp_path / "last.ckpt").unlink()
    shutil.copy(tmp_path / "step=2.ckpt", tmp_path / "last.ckpt")
    assert newest_first(tmp_path) == [tmp_path / "last.ckpt", named[0], named[2]]


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({**STATE, "rhymerl": {"num_rollouts": 3}}, "its format is 0, and this version"),
        (
            {**STATE, "rhymerl": {"format": 7}},
            f"its format is 7, and this version of rhymerl reads {FORMAT}; go on with",
        ),
        ({"state_dict": {}}, "not a checkpoint of rhymerl"),
        ([1], "not a checkpoint of rhymerl"),
    ],
)
def test_other_checkpoints_are_refused_in_one_line(state: Any, message: str, tmp_path: Path) -> None:
    path = saved(tmp_path / "step=3.ckpt", state)
    with pytest.raises(ConfigError, match=f"^RUN='{path}': {message}") as caught:
        read_checkpoint(path, setting="RUN")
    assert "\n" not in str(caught.value)
