"""Messages through pipes, and Python's plain values in them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from importlib import import_module
from typing import Any

_LENGTH_BYTES = 8
_SMALL = 2**53  # larger integers travel as hexadecimal text, which no limit on digits applies to
_CHUNK_BYTES = 2**16


class BrokenMessageError(Exception):
    """The received bytes are no message of ours; their sender is not trusted."""


def write_message(fd: int, message: Any) -> None:
    """Raises OSError when nobody reads."""
    text = json.dumps(message).encode()
    data = memoryview(len(text).to_bytes(_LENGTH_BYTES, "little") + text)
    while data:
        data = data[os.write(fd, data) :]


def read_message(fd: int, *, max_bytes: int) -> Any:
    """Wait for a message and return it. Raises EOFError at the end, BrokenMessageError for anything else."""
    length = int.from_bytes(_read(fd, _LENGTH_BYTES), "little")
    if length > max_bytes:
        raise BrokenMessageError(f"a message of {length} bytes; expected at most {max_bytes}")
    try:
        return json.loads(_read(fd, length))
    except (ValueError, RecursionError) as error:
        raise BrokenMessageError(f"not JSON: {error}") from error


def whole_messages(data: bytes) -> list[Any]:
    """Return the whole messages in `data`, from a trusted sender; the last may have been cut off."""
    messages = []
    while len(data) >= _LENGTH_BYTES:
        end = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "little")
        if len(data) < end:
            break
        messages.append(json.loads(data[_LENGTH_BYTES:end]))
        data = data[end:]
    return messages


def _read(fd: int, length: int) -> bytes:
    parts = []
    while length:
        part = os.read(fd, min(length, _CHUNK_BYTES))
        if not part:
            raise EOFError
        parts.append(part)
        length -= len(part)
    return b"".join(parts)


def encode(value: Any, refer: Callable[[Any], dict[str, Any]]) -> Any:
    """Return a plain value or container as JSON; a subclass counts as its base, `refer` replaces other objects."""
    if value is None or isinstance(value, bool | str | float):
        return value
    if isinstance(value, int):
        return int(value) if abs(value) < _SMALL else {"int": hex(value)}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, list):
        return [encode(item, refer) for item in value]
    if isinstance(value, dict):
        return {"dict": [[encode(key, refer), encode(item, refer)] for key, item in value.items()]}
    if isinstance(value, bytes | bytearray):
        return {"bytearray" if isinstance(value, bytearray) else "bytes": value.decode("latin-1")}
    for kind in (tuple, set, frozenset):
        if isinstance(value, kind):
            return {kind.__name__: [encode(item, refer) for item in value]}
    name = type(value).__name__
    if name in _NUMBERS and type(value).__module__ == _NUMBERS[name]:
        return {name: str(value)}
    return refer(value)


def refuse(kind: str, content: Any) -> Any:
    """Take no value but plain ones."""
    raise BrokenMessageError(f"unknown kind {kind!r}")


def decode(data: Any, resolve: Callable[[str, Any], Any] = refuse) -> Any:
    """Return the inverse of `encode`. Raises BrokenMessageError for what `encode` never makes."""
    try:
        return _decode(data, resolve)
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise BrokenMessageError(f"not a value: {error}") from error


def _decode(data: Any, resolve: Callable[[str, Any], Any]) -> Any:
    if isinstance(data, list):
        return [_decode(item, resolve) for item in data]
    if not isinstance(data, dict):
        return data
    ((kind, content),) = data.items()
    if kind == "dict":
        return {_decode(key, resolve): _decode(item, resolve) for key, item in content}
    if kind in _CONTAINERS:
        return _CONTAINERS[kind](_decode(item, resolve) for item in content)
    if kind in _NUMBERS:
        return getattr(import_module(_NUMBERS[kind]), kind)(content)
    return _SCALARS[kind](content) if kind in _SCALARS else resolve(kind, content)


_CONTAINERS: dict[str, Callable[[Any], Any]] = {"tuple": tuple, "set": set, "frozenset": frozenset}
_NUMBERS = {"Decimal": "decimal", "Fraction": "fractions"}  # their modules, imported where one turns up
_SCALARS: dict[str, Callable[[Any], Any]] = {
    "int": lambda text: int(text, 16),
    "complex": lambda parts: complex(*parts),
    "bytes": lambda text: text.encode("latin-1"),
    "bytearray": lambda text: bytearray(text.encode("latin-1")),
}
