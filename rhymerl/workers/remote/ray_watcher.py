"""Ends what Ray leaves behind when a trainer is killed: its agents, with the run's environment, and its folder.

    python ray_watcher.py FOLDER TRAINER

A program of its own, which outlives the trainer. The trainer holds the other end of its input. Where that ends without
a word, the trainer has. It imports nothing of rhymerl, so that it costs a trainer next to nothing.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_PATIENCE_S = 30.0
_LIVES = b"the trainer lives"


class Watcher:
    """The trainer's side: starts a watcher of the cluster in `folder`, without the run's environment."""

    def __init__(self, folder: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", __file__, folder, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env={},
        )

    def close(self) -> None:
        """End what is left of the cluster, and wait until that is done."""
        self._process.communicate(_LIVES)


def _end(folder: str, spared: set[int]) -> None:
    until = time.monotonic() + _PATIENCE_S
    while (left := list(_processes_of(folder, spared))) and time.monotonic() < until:
        for number in left:
            with suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        time.sleep(0.05)
    shutil.rmtree(folder, ignore_errors=True)


def _processes_of(folder: str, spared: set[int]) -> Iterator[int]:
    """Yield the processes of the cluster: their command line names the folder, or they write into it.

    Ray's agents give themselves another command line, which also covers a part of their environment. A trainer that
    still lives writes there, too: it is `spared`, with the processes that it has started, which it ends itself. Not so
    one that has ended: for a moment it is still their parent.
    """
    inside = os.path.join(os.path.realpath(folder), "")

    def is_inside(link: Path) -> bool:
        try:
            return os.readlink(link).startswith(inside)
        except OSError:
            return False

    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            names = folder.encode() in (path / "cmdline").read_bytes()
            if spared.isdisjoint((int(path.name), parent)) and (names or any(map(is_inside, (path / "fd").iterdir()))):
                yield int(path.name)


if __name__ == "__main__":
    trainer_lives = sys.stdin.buffer.read() == _LIVES
    _end(sys.argv[1], {os.getpid(), int(sys.argv[2])} if trainer_lives else {os.getpid()})
