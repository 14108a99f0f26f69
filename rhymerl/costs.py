"""Curves of what a pass costs by its tokens, as `rhymerl bench costs` prints them and settings give them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from math import isfinite
from pathlib import Path
from typing import Any

Points = Sequence[Sequence[float]]  # [tokens, seconds], tokens rising


def read_points(path: str | Path) -> Any:
    """What stands under `costs` in a JSON file. Raises ValueError when there is no such thing."""
    try:
        return json.loads(Path(path).read_text())["costs"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f'expected a JSON file {{"costs": [[tokens, seconds], ...]}} ({error!r})') from error


def checked_points(points: Points) -> list[tuple[float, float]]:
    """The points as numbers. Raises ValueError for a curve that is none."""
    expected = "expected at least two [tokens, seconds], tokens rising, seconds above 0 and not falling"
    try:
        pairs = [(float(tokens), float(seconds)) for tokens, seconds in points]
    except (TypeError, ValueError) as error:
        raise ValueError(expected) from error
    rising = all(one[0] < two[0] and one[1] <= two[1] for one, two in pairwise(pairs))
    finite = all(isfinite(value) for pair in pairs for value in pair)
    if len(pairs) < 2 or not rising or pairs[0][1] <= 0 or not finite:
        raise ValueError(expected)
    return pairs
