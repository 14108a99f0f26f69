"""Directories that a command writes to: made, tried out, and never shared by two runs."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

from rhymerl.errors import ConfigError

_NEEDED_BYTES = 64 * 2**20
_FILES_OF_A_RUN = (
    "config.yaml",
    "summary.json",
    "samples.jsonl",
    "rollouts.jsonl.gz",
    "history.rhyme",
    "checkpoints",
    "tensorboard",
)


def open_folder(name: str | Path, *, setting: str = "run_dir") -> Path:
    """Make the directory if need be. Raises ConfigError when it cannot be written to or the disk is full."""
    path = Path(name)
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe = path / ".rhymerl-write-test"
        probe.write_bytes(b"x" * 4096)
        probe.unlink()
    except OSError as error:
        reason = "no space left on the disk" if error.errno == errno.ENOSPC else error.strerror
        raise ConfigError(f"{setting}={str(name)!r}: {reason}; give a directory that can be written to") from error
    free = shutil.disk_usage(path).free
    if free < _NEEDED_BYTES:
        raise ConfigError(f"{setting}={str(name)!r}: {free / 2**20:.0f} MiB of disk left, at least 64 are needed")
    return path


def refuse_second_run(run_dir: Path) -> None:
    """Raise ConfigError when the directory holds a run already: two runs must not mix their samples and logs."""
    found = [name for name in _FILES_OF_A_RUN if (run_dir / name).exists()]
    if not found:
        return
    saved = (run_dir / "checkpoints" / "last.ckpt").exists()
    advice = "continue it with ckpt_path=last, or" if saved else "it saved no checkpoint; remove it, or"
    raise ConfigError(f"run_dir={str(run_dir)!r}: holds another run ({found[0]}): {advice} give another directory")
