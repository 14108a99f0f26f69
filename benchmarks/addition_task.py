"""The reward of the addition task for both sides of `trl_pretrained.py`; it needs the standard library only."""

from __future__ import annotations

import re


def last_number(completion: str, *, answer: str) -> float:
    """1 where the last number of the answer is the right one."""
    found = re.findall(r"\d+", completion)
    return float(bool(found) and found[-1] == answer)
