"""Two training runs that take turns, a step each, so that what the machine does beside them hits both alike.

The runs hold the ends of a socket pair (TURNS_SOCKET, its number; TURNS_FIRST=1 in the run that begins). A byte is the
turn. A run that has ended, or never began, leaves the other one alone.
"""

from __future__ import annotations

import json
import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning as L


class Turns(L.Callback):
    """Waits for the turn before each step; writes the seconds of each, with all that comes after it, to `file`."""

    def __init__(self, file: str) -> None:
        self._file = Path(file)
        self._socket = socket.socket(fileno=int(os.environ["TURNS_SOCKET"]))
        self._is_mine = os.environ["TURNS_FIRST"] == "1"
        self._began: float | None = None
        self._seconds: list[float] = []

    def on_train_batch_start(self, *args: Any, **kwargs: Any) -> None:
        self._end_step()
        self._pass_on()
        if not self._is_mine:
            with suppress(ConnectionError):  # the other run has ended
                self._socket.recv(1)
            self._is_mine = True
        self._began = time.perf_counter()

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        self._end_step()
        self._file.write_text(json.dumps(self._seconds))

    def _end_step(self) -> None:
        if self._began is not None:
            self._seconds.append(time.perf_counter() - self._began)

    def _pass_on(self) -> None:
        """Give the turn away after a step; the last one keeps it until the process has ended."""
        if self._began is not None:
            with suppress(ConnectionError):
                self._socket.send(b"x", socket.MSG_NOSIGNAL)
                self._is_mine = False
