"""The rewards of both sides of `trl_pretrained.py`; they need the standard library only."""

from __future__ import annotations

import re


def last_number(completion: str, *, answer: str) -> float:
    """1 where the last number of the answer is the right one."""
    found = re.findall(r"\d+", completion)
    return float(bool(found) and found[-1] == answer)


def total(completion: str, *, answer: str) -> float:
    """1 where what follows the last # is the right total."""
    _, mark, found = completion.rpartition("#")
    return float(bool(mark) and found.strip() == answer)
