"""The wire format of messages between ranks: plain data, numpy arrays and known records, signed with the run's key.

Nothing that arrives is executed or imported, and nothing is read before its signature has been checked. A message is

    signature [32] | length of the header [8] | header: JSON | arrays, one after the other

A list of records, of dicts with the same keys or of arrays becomes a column for each field: a step has thousands of
them.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rhymerl.errors import RunError

_SIGNATURE, _LENGTH = 32, 8  # bytes
_ALIGNMENT = 8
_PLAIN = {type(None), bool, int, float, str}
_NUMBERS = "biuf"  # kinds of dtypes


class Wire:
    """Packs values with a `key` that only the ranks know.

    `records` are the classes that may be in them: with slots, each of which the constructor takes by name, as frozen
    dataclasses have it.
    """

    def __init__(self, records: Iterable[type] = (), *, key: bytes) -> None:
        self._fields = {kind: tuple(kind.__slots__) for kind in records}  # type: ignore[attr-defined]
        self._by_name = {kind.__name__: kind for kind in self._fields}
        self._key = key

    def pack(self, value: Any, *, address: str) -> bytes:
        """Return a message for one `address`, such as a store's key or a numbered collective: it is good nowhere else.

        Raises TypeError, naming the type, for what does not travel.
        """
        arrays: list[npt.NDArray[Any]] = []
        header = json.dumps(self._packed(value, arrays), separators=(",", ":")).encode()
        header += b" " * (-(_LENGTH + len(header)) % _ALIGNMENT)
        parts = [len(header).to_bytes(_LENGTH, "little"), header]
        for array in arrays:
            parts += [array.tobytes(), bytes(-array.nbytes % _ALIGNMENT)]
        content = b"".join(parts)
        return self._signature(content, address) + content

    def unpack(self, message: bytes | bytearray | memoryview, *, address: str) -> Any:
        """Return the value again, its arrays writable.

        Raises RunError for a message that no rank of this run has sent to this address.
        """
        signature, content = bytes(message[:_SIGNATURE]), bytearray(message[_SIGNATURE:])
        if not hmac.compare_digest(signature, self._signature(content, address)):
            raise RunError(
                f"a message that no rank of this run has signed ({address}): another process writes to the ranks' store"
            )
        length = int.from_bytes(content[:_LENGTH], "little")
        arrays = _Arrays(content, _LENGTH + length)
        return self._unpacked(json.loads(content[_LENGTH : _LENGTH + length]), arrays)

    def _signature(self, content: bytes | bytearray, address: str) -> bytes:
        signed = hmac.new(self._key, address.encode() + b"\0", "sha256")
        signed.update(content)
        return signed.digest()

    # -- to JSON -----------------------------------------------------------------------------------------------------

    def _packed(self, value: Any, arrays: list[npt.NDArray[Any]]) -> Any:
        kind = type(value)
        if kind in _PLAIN:
            return value
        if kind is list:
            return self._column(value, arrays)
        if kind is tuple:
            return {"tuple": self._column(list(value), arrays)}
        if kind in self._fields:
            return {kind.__name__: [self._packed(getattr(value, name), arrays) for name in self._fields[kind]]}
        if isinstance(value, Mapping):
            return {"dict": [self._column(list(each), arrays) for each in (value.keys(), value.values())]}
        if isinstance(value, np.ndarray) and value.dtype.kind in _NUMBERS:
            arrays.append(value)
            return {"array": [value.dtype.str, list(value.shape)]}
        if isinstance(value, np.generic) and value.dtype.kind in _NUMBERS:
            return value.item()
        raise TypeError(f"a {kind.__name__} does not travel between ranks; plain data and numpy arrays of numbers do")

    def _column(self, values: list[Any], arrays: list[npt.NDArray[Any]]) -> Any:
        """A list; of records, arrays or dicts that are alike, with a column for each part of them."""
        kinds = set(map(type, values))
        if kinds <= _PLAIN:
            return values
        kind = kinds.pop()
        if len(values) > 1 and not kinds:
            if kind in self._fields:
                fields = self._fields[kind]
                columns = [self._column([getattr(value, name) for value in values], arrays) for name in fields]
                return {"records": [kind.__name__, len(values), columns]}
            if kind is np.ndarray and _are_alike(values):
                arrays.append(np.concatenate(values))
                return {"arrays": [values[0].dtype.str, list(map(len, values))]}
            if kind is dict and len(set(map(tuple, values))) == 1:
                names = list(values[0])
                columns = [self._column([value[name] for value in values], arrays) for name in names]
                return {"dicts": [len(values), self._column(names, arrays), columns]}
        return [self._packed(value, arrays) for value in values]

    # -- and back ----------------------------------------------------------------------------------------------------

    def _unpacked(self, node: Any, arrays: _Arrays) -> Any:
        """Unpack in the order of packing, in which the arrays follow one another."""
        if isinstance(node, list):
            return node if set(map(type, node)) <= _PLAIN else [self._unpacked(each, arrays) for each in node]
        if not isinstance(node, dict):
            return node
        ((name, content),) = node.items()
        if name == "tuple":
            return tuple(self._unpacked(content, arrays))
        if name == "dict":
            keys, values = (self._unpacked(each, arrays) for each in content)
            return dict(zip(keys, values, strict=True))
        if name == "array":
            dtype, shape = content
            return arrays.take(dtype, int(np.prod(shape, dtype=np.int64))).reshape(shape)
        if name == "arrays":
            dtype, lengths = content
            ends = np.cumsum(lengths, dtype=np.int64).tolist()
            whole = arrays.take(dtype, ends[-1])
            return [whole[end - length : end] for length, end in zip(lengths, ends, strict=True)]
        if name == "records":
            kind, count, columns = content
            return self._records(kind, self._rows(columns, count, arrays))
        if name == "dicts":
            count, names, columns = content
            names = self._unpacked(names, arrays)
            return [dict(zip(names, row, strict=True)) for row in self._rows(columns, count, arrays)]
        return self._records(name, [[self._unpacked(each, arrays) for each in content]])[0]

    def _rows(self, columns: Sequence[Any], count: int, arrays: _Arrays) -> Iterable[Sequence[Any]]:
        return zip(*(self._unpacked(column, arrays) for column in columns), strict=True) if columns else [()] * count

    def _records(self, name: str, rows: Iterable[Sequence[Any]]) -> list[Any]:
        if name not in self._by_name:
            raise RunError(
                f"a message has a {name!r}, which this rank does not know; every rank needs the same version of rhymerl"
            )
        kind = self._by_name[name]
        fields = self._fields[kind]
        return [kind(**dict(zip(fields, row, strict=True))) for row in rows]


class _Arrays:
    """The arrays of a message, taken one after the other; they share its memory."""

    def __init__(self, content: bytearray, start: int) -> None:
        self._content = content
        self._offset = start

    def take(self, dtype: str, count: int) -> npt.NDArray[Any]:
        array = np.frombuffer(self._content, np.dtype(dtype), count, self._offset)
        self._offset += array.nbytes + -array.nbytes % _ALIGNMENT
        return array


def _are_alike(values: Sequence[npt.NDArray[Any]]) -> bool:
    first = values[0].dtype
    return first.kind in _NUMBERS and all(value.ndim == 1 and value.dtype == first for value in values)
