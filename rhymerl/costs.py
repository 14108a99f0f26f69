"""The cost of a pass by its tokens: curves, as `rhymerl bench costs` prints them and settings give them."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import pairwise
from math import isfinite
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from rhymerl.types import FloatArray, IndexArray

Points = Sequence[Sequence[float]]  # [tokens, seconds], tokens rising
Amounts: TypeAlias = "int | IndexArray | FloatArray"  # of something in one pass, or in many


def points_of(costs: str | Path | Points) -> list[tuple[float, float]]:
    """Return the points that an argument `costs` gives, itself or by the name of a JSON file.

    The file is {"costs": [[tokens, seconds], ...]}. Raises ValueError, which begins with `costs=`.
    """
    if not isinstance(costs, str | Path):
        return _checked(costs, "costs")
    try:
        return _checked(_read(costs), "costs")
    except ValueError as error:
        raise ValueError(f"costs={str(costs)!r}: {error}") from error


def _read(path: str | Path) -> Any:
    try:
        return json.loads(Path(path).read_text())["costs"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f'expected a JSON file {{"costs": [[tokens, seconds], ...]}} ({error!r})') from error


def _checked(points: Points, name: str) -> list[tuple[float, float]]:
    """Return the points as numbers. Raises ValueError, which begins with `name`, for a curve that is none."""
    expected = "expected at least two [tokens, seconds], tokens rising, seconds above 0 and not falling"
    try:
        pairs = [(float(tokens), float(seconds)) for tokens, seconds in points]
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}={points!r}: {expected}") from error
    rising = all(one[0] < two[0] and one[1] <= two[1] for one, two in pairwise(pairs))
    finite = all(isfinite(value) for pair in pairs for value in pair)
    if len(pairs) < 2 or not rising or pairs[0][1] <= 0 or not finite:
        raise ValueError(f"{name}={points!r}: {expected}")
    return pairs


class PassCost(ABC):
    """Seconds of a pass over `rows` requests; where they are given, there is nothing to observe."""

    @abstractmethod
    def seconds(
        self, rows: Amounts, nodes: Amounts, asked: Amounts, *, prompt_tokens: Amounts = 0, seen: Amounts | None = None
    ) -> FloatArray:
        """Return the time of a pass for each total number of draft nodes, an array of choices.

        The drafter was asked for `asked` requests before it, and so many tokens of prompts are computed beside. `seen`
        are the keys that rows and nodes attend to, summed, where that is known. Arrays and numbers go together as
        NumPy's do.
        """

    @property
    def learns(self) -> bool:
        """Return whether `observe` changes what `seconds` returns."""
        return False

    def observe(
        self,
        rows: int,
        nodes: int,
        asked: int,
        seconds: float | None,
        *,
        prompt_tokens: int = 0,
        seen: int = 0,
    ) -> float:
        """Learn from the time of the next pass, None if it is not known; return the time that counts for it.

        Beside rows and nodes it computed so many tokens of prompts; `seen` are the keys that rows and nodes attended
        to, summed.
        """
        return float(self.seconds(rows, np.array([nodes]), asked)[0])

    def note_pause(self) -> None:
        """Passes without drafts follow that are not observed."""

    def wants_plain(self, rows: int) -> bool:
        """Return whether a pass over so many requests should go without drafts, to learn its cost."""
        return False

    @property
    def is_known(self) -> bool:
        """Return whether enough passes of both kinds have been seen to compare them."""
        return True


class CostCurve(PassCost):
    """A given curve: seconds by the tokens of a pass, linear between the points and beyond the last, and drafting time.

    `ask_cost` is the time of a pass in which the drafter is asked, and of each request that it is asked for. Any other
    unit does as well, since only ratios count. Raises ValueError for an invalid curve.
    """

    def __init__(self, points: Sequence[Sequence[float]], *, ask_cost: tuple[float, float] = (0.0, 0.0)) -> None:
        self.tokens, self.costs = np.array(_checked(points, "points")).T
        self.ask_cost = ask_cost

    @classmethod
    def read(cls, costs: str | Path) -> CostCurve:
        """Read a curve from a JSON file {"costs": [[tokens, seconds], ...]}, such as `rhymerl bench costs` prints."""
        return cls(points_of(costs))

    def seconds(
        self, rows: Amounts, nodes: Amounts, asked: Amounts, *, prompt_tokens: Amounts = 0, seen: Amounts | None = None
    ) -> FloatArray:
        tokens = rows + np.asarray(nodes, np.float64) + prompt_tokens
        slope = (self.costs[-1] - self.costs[-2]) / (self.tokens[-1] - self.tokens[-2])
        beyond = np.maximum(tokens - self.tokens[-1], 0) * slope
        a_pass, a_request = self.ask_cost
        asking = a_pass * np.greater(asked, 0) + a_request * np.asarray(asked)
        return np.asarray(np.interp(tokens, self.tokens, self.costs) + beyond + asking)
