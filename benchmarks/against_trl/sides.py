"""Settings and rewards of both sides of a comparison with TRL; standard library only."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any


def settings() -> SimpleNamespace:
    """Return what compare.py says: its options, `policy` directory, file of problems (`rows`) and `folder` for logs."""
    return SimpleNamespace(**json.loads(sys.argv[1]))


def rows_of(arguments: SimpleNamespace) -> list[dict[str, Any]]:
    """The problems: a prompt, and what the reward is given by name."""
    return [json.loads(line) for line in Path(arguments.rows).read_text().splitlines()]


def total(completion: str, *, answer: str) -> float:
    """1 where what follows the last # is the right total."""
    _, mark, found = completion.rpartition("#")
    return float(bool(mark) and found.strip() == answer)
