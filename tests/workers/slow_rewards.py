"""A reward that takes its time, and says which answers it was given."""

from __future__ import annotations

import time
from pathlib import Path


def slow(completion: str, path: str, seconds: float, column: object = None) -> float:
    """The number of words, as the reward of the other tests."""
    time.sleep(seconds)
    with Path(path).open("a") as file:
        file.write(f"{completion}\n")
    return float(len(completion.split()))
