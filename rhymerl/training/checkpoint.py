"""Checkpoint files: checks that they are whole, their contents, and the newest whole one of a run."""

from __future__ import annotations

import os
import pickle
import struct
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from rhymerl.errors import ConfigError
from rhymerl.training import shards

FORMAT = 5  # of what a RhymeModule keeps in a checkpoint

_END = struct.Struct("<4s16xH")  # of a zip file: its signature and the length of the comment behind it
_END_SIGNATURE = b"PK\5\6"
_LOCAL = struct.Struct(
    "<4s22xHH"
)  # before each record: the signature, the length of its name and of what fills up the space
_SEAL = b"rhymerl %08x"  # the comment: a checksum of all that is no record

_BROKEN_ZIP = (zipfile.BadZipFile, zlib.error, struct.error, EOFError, NotImplementedError, RuntimeError)
_BROKEN_NUMBER = (ValueError, OverflowError, MemoryError)  # a size or an offset that makes no sense


def seal(file: BinaryIO) -> None:
    """Add what `damage` looks for to a file that `torch.save` has just written: a checksum of all that is no record."""
    file.seek(-_END.size, os.SEEK_END)
    signature, comment_bytes = _END.unpack(file.read())
    assert (signature, comment_bytes) == (_END_SIGNATURE, 0), "torch.save ends a file in another way"
    file.seek(-2, os.SEEK_END)
    file.write(struct.pack("<H", len(_SEAL % 0)))
    with zipfile.ZipFile(file) as archive:
        checksum = _checksum_between(file, archive.infolist(), file.seek(0, os.SEEK_END))
    file.seek(0, os.SEEK_END)
    file.write(_SEAL % checksum)


def damage(path: Path) -> str | None:
    """Return what is wrong with the file, None when it is whole.

    In a sealed file a single wrong bit is found. torch writes a checksum with each record but does not look at it.
    Reads all of the file, which takes about half a second a GB where the disk is faster than that.
    """
    try:
        with path.open("rb") as file, zipfile.ZipFile(file) as archive:
            wrong = archive.testzip()
            if wrong is not None:
                return f"the checksum of its record {wrong!r} differs"
            if reason := _damage_between(file, archive):
                return reason
        if not shards.has_shards(path.resolve().parent):
            return None
        checkpoint = _load(path)
        return shards.damage_of(checkpoint, path) if shards.KEY in checkpoint else None
    except OSError as error:
        return error.strerror or str(error)
    except (*_BROKEN_ZIP, *_BROKEN_NUMBER) as error:
        return (str(error) or type(error).__name__).splitlines()[0]


def _load(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    return found


def _damage_between(file: BinaryIO, archive: zipfile.ZipFile) -> str | None:
    """Return what is wrong around the records."""
    comment = archive.comment
    end = file.seek(0, os.SEEK_END) - len(comment)
    file.seek(end - _END.size)
    if _END.unpack(file.read(_END.size)) != (_END_SIGNATURE, len(comment)):
        return "there is something behind its end"
    if comment and comment != _SEAL % _checksum_between(file, archive.infolist(), end):
        return "the checksum of what is between its records differs"
    return None


def _checksum_between(file: BinaryIO, records: list[zipfile.ZipInfo], end: int) -> int:
    """CRC-32 of all bytes before `end` but the contents of records, which have checksums of their own."""
    checksum, offset = 0, 0
    for record in sorted(records, key=lambda each: each.header_offset):
        file.seek(record.header_offset)
        _, name_bytes, filling_bytes = _LOCAL.unpack(file.read(_LOCAL.size))
        start = record.header_offset + _LOCAL.size + name_bytes + filling_bytes
        file.seek(offset)
        checksum = zlib.crc32(file.read(start - offset), checksum)
        offset = start + record.compress_size
    file.seek(offset)
    return zlib.crc32(file.read(end - offset), checksum)


def unreadable(where: str, reason: str) -> ConfigError:
    """Return the error for a checkpoint that is damaged."""
    return ConfigError(f"{where}: not a checkpoint that can be read: {reason}")


def read_checkpoint(path: Path, *, setting: str = "ckpt_path", is_whole: bool = False) -> dict[str, Any]:
    """Return a whole checkpoint of ours, its tensors left on the disk; of one in parts names and shapes.

    Raises ConfigError for any other file; of one that is damaged it says which older one beside it is whole. Its
    checksums are looked at unless that has been done (`is_whole`).
    """
    where = f"{setting}={str(path)!r}"
    if not is_whole and (reason := damage(path)):
        raise unreadable(where, f"{reason}{_advice(path)}")
    try:
        checkpoint: Any = _load(path)
    except (RuntimeError, ValueError, EOFError, OSError, pickle.UnpicklingError) as error:
        raise ConfigError(f"{where}: not a checkpoint that can be read{_advice(path)}") from error
    if not isinstance(checkpoint, dict) or not isinstance(checkpoint.get("rhymerl"), dict):
        raise ConfigError(f"{where}: not a checkpoint of rhymerl")
    checkpoint["rhymerl"] = of_this_format(checkpoint["rhymerl"], where)
    if shards.KEY in checkpoint:
        shards.folder_of(checkpoint, path, where)
    return checkpoint


def policy_outline(checkpoint: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the policy's weights from a module's, which may include other models; those saved in parts are empty."""
    return {
        name.removeprefix("model."): each
        for name, each in checkpoint["state_dict"].items()
        if name.startswith("model.")
    }


def policy_reader(path: Path, checkpoint: dict[str, Any]) -> Callable[[Sequence[str]], dict[str, Tensor]]:
    """Return a function that reads policy weights by name; `path`, read as `checkpoint`, may be removed then."""
    if shards.KEY in checkpoint:
        return shards.StoredWeights(checkpoint, shards.folder_of(checkpoint, path, str(path)), prefix="model.").read
    weights = policy_outline(checkpoint)
    return lambda names: {name: weights[name] for name in names}


def state_in(checkpoint: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the module's state in a checkpoint whose tensors are there. Raises ConfigError for another one."""
    if shards.KEY in checkpoint:
        raise ConfigError(
            f"{where}: its tensors are in parts, which rhymerl.callbacks.AtomicCheckpointIO puts together (Trainer(plugins=[...])); or "
            "take the policy with rhymerl export"
        )
    return of_this_format(checkpoint["rhymerl"], where)


def of_this_format(state: dict[str, Any], where: str) -> dict[str, Any]:
    """Return a module's state in this version's format. Raises ConfigError for a state that it cannot read."""
    found = state.get("format", 0)
    if found != FORMAT:
        raise ConfigError(
            f"{where}: its format is {found}, and this version of rhymerl reads {FORMAT}; go on with the version that wrote it, or start a "
            "new run"
        )
    return state


def newest_whole(directory: Path) -> tuple[Path | None, dict[Path, str]]:
    """Return the newest whole checkpoint, None when there is none, and why newer ones were passed over.

    Looks at the checksums of one file after another, from the newest on.
    """
    damaged: dict[Path, str] = {}
    for path in newest_first(directory):
        reason = damage(path)
        if reason is None:
            return path, damaged
        if not path.exists():  # its run goes on, and has removed it meanwhile
            return newest_whole(directory)
        damaged[path] = reason
    return None, damaged


def newest_first(directory: Path) -> list[Path]:
    """Return a run's checkpoints, newest first, without those after `last.ckpt`, from before it was rolled back."""
    by_step = {step: path for path in directory.glob("step=*.ckpt") if (step := step_of(path)) is not None}
    paths = [by_step[step] for step in sorted(by_step, reverse=True)]
    last = directory / "last.ckpt"
    if not last.exists():
        return paths
    newest = last.resolve()
    if newest in [path.resolve() for path in paths]:
        return paths[[path.resolve() for path in paths].index(newest) :]
    return [last, *paths]  # a file of its own, as some ways of copying make of a link


def step_of(path: Path) -> int | None:
    """Return the rollout steps that are in a checkpoint, by its name."""
    number = path.stem.removeprefix("step=")
    return int(number) if path.stem.startswith("step=") and number.isdecimal() else None


def _advice(path: Path) -> str:
    """Return which other checkpoint to take instead of a damaged one."""
    mine = path.resolve()
    others = newest_first(mine.parent)
    older = others[others.index(mine) + 1 :] if mine in others else []
    whole = next((each for each in older if damage(each) is None), None)
    if whole is not None:
        return f"; the newest whole one before it is {str(whole)!r}, which ckpt_path=auto takes"
    return "; no older one beside it is whole" if older else ""
