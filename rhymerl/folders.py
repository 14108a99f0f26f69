"""Output directories: checked, made, never shared by two runs; and the message for a full disk."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime
from gzip import GzipFile
from pathlib import Path
from typing import IO, Self
from weakref import WeakSet

from rhymerl.errors import ConfigError, RunError

_LOG = logging.getLogger(__name__)

_NEEDED_BYTES = 64 * 2**20
_LOCK = "run.lock"
_UNWRITTEN = (ValueError, TypeError, KeyError)  # what reading the lock raises, which is empty at first
_OF_AN_END = ("summary.json", "history.rhyme")
_FILES_OF_A_RUN = (
    "config.yaml",
    "summary.json",
    "samples.jsonl",
    "rollouts.jsonl.gz",
    "steps.jsonl.gz",
    "passes.jsonl.gz",
    "history.rhyme",
    "checkpoints",
    "tensorboard",
)


def read_lines(file: IO[bytes] | GzipFile, *, most_bytes: int) -> Iterator[bytes]:
    """Yield the lines of a file that may be anybody's. Raises ValueError at one that is longer than `most_bytes`."""
    while line := file.readline(most_bytes + 1):
        if len(line) > most_bytes:
            raise ValueError(f"longer than {most_bytes / 2**20:.0f} MiB")
        yield line


def check_folder(name: str | Path, *, setting: str = "run_dir") -> None:
    """Raise ConfigError when the directory could not be made or written to, or its disk is full; makes nothing."""
    path = Path(name)
    nearest = next(each for each in (path, *path.absolute().parents) if each.exists() or each.is_symlink())
    if not nearest.is_dir():
        raise _refused(setting, name, "Not a directory")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise _refused(setting, name, "Permission denied")
    free = shutil.disk_usage(nearest).free
    if free < _NEEDED_BYTES:
        raise ConfigError(f"{setting}={str(name)!r}: {free / 2**20:.0f} MiB of disk left, at least 64 are needed")


def open_folder(name: str | Path, *, setting: str = "run_dir") -> Path:
    """Make the directory if need be. Raises ConfigError when it cannot be written to or the disk is full."""
    path = Path(name)
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path, buffering=0) as probe:  # without a name that two processes could share
            probe.write(b"x" * 4096)
    except OSError as error:
        reason = "no space left on the disk" if error.errno == errno.ENOSPC else str(error.strerror)
        raise _refused(setting, name, reason) from error
    check_folder(path, setting=setting)
    return path


@contextmanager
def unmade_if_empty(path: Path) -> Iterator[None]:
    """Context that removes a directory made within, and those above it, if nothing was put there."""
    made = [each for each in (path, *path.parents) if not each.exists()]
    try:
        yield
    finally:
        for each in made:
            with suppress(OSError):  # there is something in it
                each.rmdir()


def _refused(setting: str, name: str | Path, reason: str) -> ConfigError:
    return ConfigError(f"{setting}={str(name)!r}: {reason}; give a directory that can be written to")


class RunFolder:
    """A run's directory as a context manager: held by this process while it runs, and removed if it stays empty.

    Entering raises ConfigError when the directory cannot be used, or another process uses it. Only `open` makes it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._unmakes = ExitStack()
        self._lock: _Lock | None = None

    def __enter__(self) -> Self:
        check_folder(self.path)
        if self.path.is_dir():
            self._lock = _Lock(self.path)
        return self

    def refuse_second_run(self, *, may_start_over: bool) -> None:
        """Raise ConfigError when the directory holds a run already: two runs must not mix their samples and logs.

        What a run has left that was ended before its first checkpoint is no obstacle to one that `may_start_over`.
        """
        found = [name for name in _FILES_OF_A_RUN if (self.path / name).exists()]
        saved = list(self.path.glob("checkpoints/*.ckpt"))
        if not found or (may_start_over and not saved and not any(name in found for name in _OF_AN_END)):
            return
        advice = (
            f"continue it with rhymerl resume {self.path} (or ckpt_path=last), or"
            if saved
            else "it saved no checkpoint; remove it, or"
        )
        raise ConfigError(
            f"run_dir={str(self.path)!r}: holds another run ({found[0]}): {advice} give another directory"
        )

    def open(self, *, starts_over: bool = False) -> None:
        """Make the directory, if it is not there, once nothing is known to be wrong with the run.

        A run that `starts_over` does not mix its files with what one without a checkpoint has left.
        """
        self._unmakes.enter_context(unmade_if_empty(self.path))
        open_folder(self.path)
        self._unmakes.callback(self._remove_curves_of_nothing)
        self._lock = self._lock or _Lock(self.path)
        if starts_over:
            shutil.rmtree(self.path / "tensorboard", ignore_errors=True)
            for name in ("samples.jsonl", "rollouts.jsonl.gz", "steps.jsonl.gz"):
                (self.path / name).unlink(missing_ok=True)

    def __exit__(self, *of_an_error: object) -> None:
        if self._lock is not None:
            self._lock.release()
        self._unmakes.close()

    def _remove_curves_of_nothing(self) -> None:
        """Remove what the logger has begun of a run that was refused before its first step."""
        with suppress(OSError):  # somebody has moved it
            if [each.name for each in self.path.iterdir()] == ["tensorboard"]:
                shutil.rmtree(self.path / "tensorboard")


class _Lock:
    """The file `run.lock` of a directory, which names its holder; the lock is released however the process ends."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / _LOCK
        self._descriptor: int | None = self._take()
        _locks.add(self)

    def _take(self) -> int:
        setting = f"run_dir={str(self._path.parent)!r}"
        try:
            while True:
                descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
                self._lock(descriptor, setting)
                if self._path.exists() and os.path.samestat(os.fstat(descriptor), os.stat(self._path)):
                    break
                os.close(descriptor)  # its holder has just removed it
            mine = {"pid": os.getpid(), "host": socket.gethostname(), "since": f"{datetime.now():%Y-%m-%d %H:%M:%S}"}
            os.truncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(mine).encode(), 0)
        except OSError as error:
            raise ConfigError(f"{setting}: {_LOCK} cannot be written: {error.strerror}") from error
        return descriptor

    def _lock(self, descriptor: int, setting: str) -> None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _holder(os.pread(descriptor, 4096, 0))
            os.close(descriptor)
            raise ConfigError(f"{setting}: in use by {holder}; wait for its end, or give another directory") from None
        except OSError as error:
            _LOG.warning(
                "%s: its file system has no locks (%s), so nothing keeps a second run out", setting, error.strerror
            )

    def release(self) -> None:
        """Remove the file, then release the lock, so that nobody else can hold it in between."""
        if self._descriptor is not None:
            self._path.unlink(missing_ok=True)
            self.close()

    def close(self) -> None:
        """Close the file. A forked child does so as well: it must not hold what is its parent's."""
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor = None


def is_in_use(directory: Path) -> bool:
    """Return whether a process holds a run's directory; one of another machine does so until it gives it back."""
    try:
        known = json.loads((directory / _LOCK).read_bytes())
        if known["host"] == socket.gethostname():
            os.kill(known["pid"], 0)
    except (FileNotFoundError, NotADirectoryError, ProcessLookupError):
        return False
    except (PermissionError, *_UNWRITTEN):  # another user's, or it has not been written yet
        return True
    return True


def _holder(content: bytes) -> str:
    try:
        known = json.loads(content)
        return f"process {known['pid']} on {known['host']}, since {known['since']}"
    except _UNWRITTEN:
        return "another process"


_locks: WeakSet[_Lock] = WeakSet()


def _close_in_child() -> None:
    for lock in _locks:
        lock.close()


os.register_at_fork(after_in_child=_close_in_child)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Context in which a failed write is a RunError that names the file, and what is left on its device."""
    try:
        yield
    except OSError as error:
        raise cannot_write(path, error) from error


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a path to write to; it replaces `path` once it is whole. Raises RunError as `writing` does."""
    part = path.with_name(f".{path.name}.part")
    try:
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            yield part
            part.replace(path)
    finally:
        with suppress(OSError):
            part.unlink()


def cannot_write(path: Path, error: OSError) -> RunError:
    """Return the message for a file that could not be written during a run."""
    free = shutil.disk_usage(next(each for each in path.absolute().parents if each.exists())).free
    return RunError(
        f"{path}: cannot be written: {error.strerror or error} ({free / 2**20:,.0f} MiB left on its device); what was saved before is "
        "whole: make room, then go on from there"
    )
