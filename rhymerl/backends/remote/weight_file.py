"""One file of new weights for several engines, each of which loads it from its own folder in its own time."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

_NAME = "shared"  # beside the file; engines read *.safetensors


class SharedWeightFile:
    """The newest weights: the first of `num_engines` engines writes them, and the others link to that file.

    Any thread may call it. The file is kept until all engines have had it, or there are newer weights.
    """

    def __init__(self, num_engines: int) -> None:
        self._num_engines = num_engines
        self._lock = threading.Lock()
        self._version = -1
        self._path: Path | None = None
        self._num_left = 0  # engines that have not had it

    def put(self, file: Path, version: int, write: Callable[[Path], None]) -> None:
        """Make `file`: a link to that of this version, or by `write`, whose errors it raises; the caller removes it."""
        with self._lock:
            if self._link(file, version):
                return
            write(file)
            if version > self._version:
                self._keep(file, version)

    def _link(self, file: Path, version: int) -> bool:
        if version != self._version or self._path is None:
            return False
        try:
            os.link(self._path, file)
        except OSError:  # it lies on another disk, or its folder is gone
            return False
        self._num_left -= 1
        if not self._num_left:
            self._drop()
        return True

    def _keep(self, file: Path, version: int) -> None:
        self._drop()
        self._version, self._num_left = version, self._num_engines - 1
        if self._num_left:
            kept = file.with_name(_NAME)
            with suppress(OSError):  # where a disk knows no links each engine has a file of its own
                os.link(file, kept)
                self._path = kept

    def _drop(self) -> None:
        if self._path is not None:
            self._path.unlink(missing_ok=True)
        self._path = None
