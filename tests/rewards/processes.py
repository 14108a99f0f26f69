"""The running processes, by what the kernel says of them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path


def descendants(of: int | None = None) -> list[int]:
    """Processes that this one or another has started, directly or not."""
    children = []
    for path in Path(f"/proc/{of or os.getpid()}/task").glob("*/children"):
        try:
            children += [int(pid) for pid in path.read_text().split()]
        except OSError:  # it has gone meanwhile
            continue
    return [*children, *(pid for child in children for pid in descendants(child))]


def is_alive(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def wait_until(holds: Callable[[], bool]) -> bool:
    """Return whether it holds after some seconds at most."""
    give_up = time.monotonic() + 60.0
    while not (held := holds()) and time.monotonic() < give_up:
        time.sleep(0.01)
    return held
