"""The storage of token ids: in memory, or in a memory-mapped scratch file."""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from rhymerl.errors import RunError
from rhymerl.types import IntArray

TOKEN_BYTES = 4
_FIRST_MAP_BYTES = 2**20


class TokenMemory:
    """Read-only arrays in memory; `num_live` counts the tokens that were put and not dropped."""

    def __init__(self) -> None:
        self.num_live = 0

    def put(self, token_ids: IntArray) -> IntArray:
        """Return a read-only copy, int32; an array of another store's is shared."""
        self.num_live += len(token_ids)
        if token_ids.base is None and not token_ids.flags.writeable and token_ids.dtype == np.int32:
            return token_ids
        copy = np.array(token_ids, np.int32)
        copy.flags.writeable = False
        return copy

    def drop(self, token_ids: IntArray) -> None:
        """Count an array that was put as no longer needed."""
        self.num_live -= len(token_ids)

    @property
    def is_mostly_dead(self) -> bool:
        """Return whether moving what is live to a `fresh` one would free more than half of the space."""
        return False

    def fresh(self) -> TokenMemory:
        """Return an empty one of the same kind."""
        return TokenMemory()


class TokenFile(TokenMemory):
    """Read-only arrays in an append-only file without a name: it is gone with the process, however that ends.

    Arrays stay valid as long as anyone holds them, also after the file has given way to a fresh one.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.directory = directory
        self.num_put = 0
        with self._disk_errors(), tempfile.TemporaryFile(dir=directory) as file:
            self._file = os.dup(file.fileno())
        weakref.finalize(self, os.close, self._file)
        self._map = self._make_map(_FIRST_MAP_BYTES)

    def put(self, token_ids: IntArray) -> IntArray:
        """Return a read-only view of the file. Raises RunError when the disk is full."""
        data = np.asarray(token_ids, np.int32).tobytes()
        start = self.num_put * TOKEN_BYTES
        self._write(data, start)
        while start + len(data) > len(self._map):
            self._map = self._make_map(2 * len(self._map))
        self.num_live += len(token_ids)
        self.num_put += len(token_ids)
        return np.frombuffer(self._map, np.int32, count=len(token_ids), offset=start)

    @property
    def is_mostly_dead(self) -> bool:
        return 2 * self.num_live < self.num_put

    def fresh(self) -> TokenFile:
        return TokenFile(self.directory)

    def _write(self, data: bytes, start: int) -> None:
        # Not through the map: a full disk would kill the process there.
        left = memoryview(data)
        with self._disk_errors():
            while left:
                num_bytes = os.pwrite(self._file, left, start)
                left, start = left[num_bytes:], start + num_bytes

    def _make_map(self, num_bytes: int) -> mmap.mmap:
        with self._disk_errors():
            os.ftruncate(self._file, num_bytes)
            return mmap.mmap(self._file, num_bytes, access=mmap.ACCESS_READ)

    @contextmanager
    def _disk_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RunError(f"history.spill={str(self.directory)!r}: {error.strerror}") from error
