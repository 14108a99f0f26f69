"""What a pass costs: given as a curve over its tokens, or learned from the passes that have been."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from rhymerl.errors import ConfigError

if TYPE_CHECKING:
    from rhymerl.types import FloatArray, IndexArray

_FORGET = 0.998  # a pass; half of what is known is of the last 350
_PRIOR_PASSES = 8.0  # how many passes the guess before the first one counts for
_SOLVE_EVERY = 8  # passes
_LARGEST_SURPRISE = (
    3.0  # a pass that took longer than so many times what was expected was interrupted by something else
)


class PassCost(Protocol):
    """Seconds of a pass over `rows` requests."""

    def seconds(self, rows: int, nodes: IndexArray, asked: int) -> FloatArray:
        """With so many draft nodes in all (an array of choices), after the drafter was asked for `asked` requests."""

    def observe(self, rows: int, nodes: int, asked: int, seconds: float) -> None:
        """A pass has taken so long."""


class CostCurve:
    """Given: seconds by the tokens of a pass, straight between the points and beyond the last one. Drafting itself is free.

    A unit other than seconds does as well: only ratios count. Raises ConfigError for a curve that is none.
    """

    def __init__(self, points: Sequence[Sequence[float]]) -> None:
        _check_points(points)
        self.tokens = np.array([point[0] for point in points], np.float64)
        self.costs = np.array([point[1] for point in points], np.float64)

    @classmethod
    def read(cls, path: str | Path) -> CostCurve:
        """From a JSON file {"costs": [[tokens, seconds], ...]}, such as `rhymerl bench costs` prints."""
        try:
            content = json.loads(Path(path).read_text())
            points = content["costs"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f'budget.costs={str(path)!r}: expected a JSON file {{"costs": [[tokens, seconds], ...]}} ({error!r})'
            ) from error
        return cls(points)

    def seconds(self, rows: int, nodes: IndexArray, asked: int) -> FloatArray:
        tokens = rows + np.asarray(nodes, np.float64)
        slope = (self.costs[-1] - self.costs[-2]) / (self.tokens[-1] - self.tokens[-2])
        beyond = np.maximum(tokens - self.tokens[-1], 0) * slope
        return np.asarray(np.interp(tokens, self.tokens, self.costs) + beyond)

    def observe(self, rows: int, nodes: int, asked: int, seconds: float) -> None:
        """Nothing: it is given."""


def _check_points(points: Sequence[Sequence[float]]) -> None:
    expected = "expected at least two [tokens, seconds], tokens rising, seconds above 0 and not falling"
    try:
        pairs = [(float(tokens), float(seconds)) for tokens, seconds in points]
    except (TypeError, ValueError) as error:
        raise ConfigError(f"budget.costs={points!r}: {expected}") from error
    rising = all(one[0] < two[0] and one[1] <= two[1] for one, two in pairwise(pairs))
    if len(pairs) < 2 or not rising or pairs[0][1] <= 0:
        raise ConfigError(f"budget.costs={points!r}: {expected}")


class LearnedCost:
    """Learned: seconds = a + b rows + c nodes + d asked, by least squares that forgets; straight, but fitted where passes are.

    Before the first pass nodes are held to be cheap, so that they are tried.
    """

    def __init__(self) -> None:
        self._products = np.zeros((4, 4))
        self._sums = np.zeros(4)
        self._weights = np.array([1.0, 1 / 64, 1 / 128, 1 / 512])
        self.num_passes = 0

    def seconds(self, rows: int, nodes: IndexArray, asked: int) -> FloatArray:
        constant, per_row, per_node, per_asked = self._weights
        return np.asarray(constant + per_row * rows + per_asked * asked + per_node * np.asarray(nodes, np.float64))

    def observe(self, rows: int, nodes: int, asked: int, seconds: float) -> None:
        features = np.array([1.0, rows, nodes, asked])
        expected = float(features @ self._weights)
        if self.num_passes == 0:  # only now is the unit known
            self._weights *= seconds / expected
            self._products = np.diag([1.0, 32.0**2, 64.0**2, 32.0**2]) * _PRIOR_PASSES
            self._sums = self._products @ self._weights
        elif self.num_passes <= _SOLVE_EVERY and _LARGEST_SURPRISE * seconds < expected:  # the first was the odd one
            self._weights *= seconds / expected
            self._products, self._sums = self._products / _PRIOR_PASSES, self._products / _PRIOR_PASSES @ self._weights
        elif seconds > _LARGEST_SURPRISE * expected and self.num_passes > _SOLVE_EVERY:
            seconds = _LARGEST_SURPRISE * expected
        self._products = _FORGET * self._products + np.outer(features, features)
        self._sums = _FORGET * self._sums + features * seconds
        self.num_passes += 1
        if self.num_passes % _SOLVE_EVERY == 0:
            self._solve()

    def _solve(self) -> None:
        """Least squares without negative costs: a feature that would be paid for is left out."""
        used = np.ones(4, np.bool_)
        while True:
            ridge = 1e-9 * np.trace(self._products) * np.eye(used.sum())
            solved = np.linalg.solve(self._products[np.ix_(used, used)] + ridge, self._sums[used])
            if (solved >= 0).all():
                break
            used[np.flatnonzero(used)[solved < 0]] = False
        self._weights = np.zeros(4)
        self._weights[used] = solved
        self._weights = np.maximum(self._weights, 1e-6 * self._weights.max())
