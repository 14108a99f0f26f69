"""The file that a history is saved in: a header, then sections, each with its checksum.

magic (8 bytes) | format version, bytes of the header, CRC-32 of the header (3 x u32, little-endian)
header: JSON {"tokenizer": …, "sections": [[name, bytes, CRC-32], …]} | the sections, one after another
"""

from __future__ import annotations

import io
import json
import os
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from rhymerl.errors import DataError

MAGIC = b"rhymehis"
FORMAT = 1
_PREFIX = struct.Struct("<8sIII")


def write_sections(path: str | Path, sections: Mapping[str, bytearray], *, tokenizer: str) -> None:
    """Write beside the target, then rename: the old file stays whole until the new one is on the disk.

    Raises DataError when the file cannot be written.
    """
    target = Path(path)
    part = target.with_name(f".{target.name}.part")
    try:
        with part.open("wb") as file:
            _write(file, sections, tokenizer)
            file.flush()
            os.fsync(file.fileno())
        part.replace(target)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise DataError(f"history file {str(path)!r}: cannot be written: {error.strerror}") from error


def read_sections(path: str | Path, *, tokenizer: str | None) -> dict[str, bytes]:
    """Return all sections, checked; `tokenizer` None accepts any. Raises DataError naming the file and its defect."""
    location = f"history file {str(path)!r}"
    try:
        with Path(path).open("rb") as file:
            return _read(file, location, tokenizer)
    except OSError as error:
        raise DataError(f"{location}: cannot be read: {error.strerror}") from error


def to_bytes(sections: Mapping[str, bytearray]) -> bytes:
    """Return a file of these sections, as a message."""
    _write(file := io.BytesIO(), sections, tokenizer="")
    return file.getvalue()


def from_bytes(content: bytes) -> dict[str, bytes]:
    """Return the inverse of `to_bytes`, checked as a file is. Raises DataError."""
    return _read(io.BytesIO(content), "history message", None)


def _write(file: BinaryIO, sections: Mapping[str, bytearray], tokenizer: str) -> None:
    listed = [[name, len(data), zlib.crc32(data)] for name, data in sections.items()]
    header = json.dumps({"tokenizer": tokenizer, "sections": listed}).encode()
    file.write(_PREFIX.pack(MAGIC, FORMAT, len(header), zlib.crc32(header)))
    file.write(header)
    for data in sections.values():
        file.write(data)


def _read(file: BinaryIO, location: str, tokenizer: str | None) -> dict[str, bytes]:
    header = _read_header(file, location)
    if tokenizer is not None and header.tokenizer != tokenizer:
        raise DataError(
            f"{location}: its token ids are those of the tokenizer {header.tokenizer!r}, but this run has {tokenizer!r}"
        )
    sections = {}
    for name, num_bytes, checksum in header.sections:
        data = _take(file, num_bytes, location)
        if zlib.crc32(data) != checksum:
            raise DataError(f"{location}: corrupt: the checksum of its section {name!r} differs")
        sections[name] = data
    if file.read(1):
        raise DataError(f"{location}: corrupt: it goes on after its last section")
    return sections


@dataclass(frozen=True, slots=True, kw_only=True)
class _Header:
    tokenizer: str
    sections: list[tuple[str, int, int]]  # name, bytes, CRC-32


def _read_header(file: BinaryIO, location: str) -> _Header:
    start = file.read(len(MAGIC))
    if not MAGIC.startswith(start):
        raise DataError(f"{location}: not a history file")
    file.seek(0)
    _, version, num_bytes, checksum = _PREFIX.unpack(_take(file, _PREFIX.size, location))
    if version > FORMAT:
        raise DataError(f"{location}: its format {version} is newer than {FORMAT}, the newest that this rhymerl reads")
    header = _take(file, num_bytes, location)
    if version < 1 or zlib.crc32(header) != checksum:
        raise DataError(f"{location}: corrupt: the checksum of its header differs")
    return _parsed(header, location)


def _parsed(content: bytes, location: str) -> _Header:
    """Return the parsed header, checked: its checksum does not say who wrote it."""
    try:
        known = json.loads(content)
        sections = [(name, num_bytes, checksum) for name, num_bytes, checksum in known["sections"]]
        header = _Header(tokenizer=known["tokenizer"], sections=sections)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise DataError(f"{location}: corrupt: its header cannot be read") from error
    kinds = [isinstance(header.tokenizer, str), *(_is_section(*each) for each in sections)]
    if not all(kinds) or len({name for name, *_ in sections}) < len(sections):
        raise DataError(f"{location}: corrupt: its header does not list sections")
    return header


def _is_section(name: object, num_bytes: object, checksum: object) -> bool:
    return isinstance(name, str) and type(num_bytes) is int and num_bytes >= 0 and type(checksum) is int


def _take(file: BinaryIO, num_bytes: int, location: str) -> bytes:
    """Looks first whether they are there: what a header claims may be more than there is memory."""
    here = file.tell()
    left = file.seek(0, os.SEEK_END) - here
    if left < num_bytes:
        raise DataError(f"{location}: truncated: it ends {num_bytes - left} bytes too early")
    file.seek(here)
    return file.read(num_bytes)
