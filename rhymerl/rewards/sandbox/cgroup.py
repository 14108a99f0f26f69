"""The control group that this process is in, for what the kernel has refused it."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")


def num_refused() -> int:
    """Return how many processes and threads the kernel has refused this group and its ancestors for lack of pids.

    The result is 0 where the group has no limit or cannot be seen, as in some containers.
    """
    return sum(_refused_by(folder / "pids.events") for folder in _folders())


def _folders() -> list[Path]:
    """Return the folder that limits processes, by cgroup's first or second version, and all folders above it."""
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            root = _ROOT / "pids" if controllers == "pids" else _ROOT
            folder = root / path.lstrip("/")
            if controllers in ("", "pids") and (folder / "pids.events").exists():
                return [folder, *(parent for parent in folder.parents if parent.is_relative_to(root))]
    return []


def _refused_by(events: Path) -> int:
    with suppress(OSError):
        for line in events.read_text().splitlines():
            name, _, count = line.partition(" ")
            if name == "max":
                return int(count)
    return 0
