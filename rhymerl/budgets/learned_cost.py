"""The cost of a pass, learned from the passes so far."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from rhymerl.costs import PassCost

if TYPE_CHECKING:
    from rhymerl.types import FloatArray, IndexArray

_FORGET = 0.998  # a pass; half of what is known is of the last 350 of its kind
_SOLVE_EVERY = 8  # passes
_PLAIN_AFTER = 4, 64  # passes with drafts in a row, at first and later: a pass without them where they pay loses little
_ENOUGH = 3  # passes of a kind
_GUESS = np.array([1.0, 1 / 64, 1 / 128, 1 / 512, 1 / 8])  # before the first pass, in whatever unit
_TYPICAL = np.array([1.0, 32.0, 64.0, 32.0, 1.0]) / 4  # features of the pass that the guess counts for afterwards
_NODES, _ANY_ASKED = 2, 4  # where these features stand in `_features`
_LARGEST_SURPRISE = 3.0  # times what was expected
_DOUBT = 0.9  # what is left of all that is known after a larger one: many in a row are another machine
_LEAST_S = 1e-9
_SIZES = 24  # of batches, by the binary digits of their rows
_CORRECT_OVER = 32  # passes of a size and kind
_LARGEST_CORRECTION = 1.5  # times what was expected, a pass


class LearnedCost(PassCost):
    """Learned: seconds = (a + b rows + c nodes + d asked + [asked > 0] e) * r, by least squares of relative errors that forgets.

    Passes are not as straight as that, so r corrects it by the size of the batch, for passes with and without drafts apart: the two
    are compared, and what is a little wrong for one of them would be a loss that nobody notices. Before the first pass nodes are
    held to be cheap, so that they are tried. What takes far longer than expected (a compiler ran, or another program) weighs
    little, as long as that is rare.
    """

    def __init__(self) -> None:
        self._weights = _GUESS
        self._first: list[tuple[FloatArray, float]] = []  # features and seconds, until there are enough to solve for
        # One for passes for which the drafter was left alone, and one for the others. Each forgets by its own passes: while one kind
        # is all there is, what is known of the other must not fade, because the two are compared.
        self._products = np.zeros((2, len(_GUESS), len(_GUESS)))
        self._sums = np.zeros((2, len(_GUESS)))
        self.num_passes = 0
        self._num_of_kind = [0, 0]  # passes without and with asking
        self._corrections = np.ones((2, _SIZES))  # r by kind and by the binary digits of the rows
        self._num_of_size = np.zeros((2, _SIZES), np.int64)
        self._since_plain = 0
        self._plain_after = _PLAIN_AFTER[0]

    def wants_plain(self, rows: int) -> bool:
        """Drafts are compared with passes without them. Where they always seem to pay there would be none to know those by."""
        plain, asked = self._num_of_size[:, _size(rows)]
        return self._since_plain >= self._plain_after or bool(plain < min(asked, _ENOUGH))

    @property
    def is_known(self) -> bool:
        return self.num_passes >= _SOLVE_EVERY and min(self._num_of_kind) >= _ENOUGH

    def seconds(self, rows: int, nodes: FloatArray | IndexArray, asked: int) -> FloatArray:
        per_node = self._weights[_NODES]
        straight = float(_features(rows, 0, asked) @ self._weights) + per_node * np.asarray(nodes, np.float64)
        return np.asarray(self._correction(int(asked > 0), _size(rows)) * straight)

    def _correction(self, kind: int, size: int) -> float:
        """Return the r of the nearest size that is known, of the other kind where nothing of this one is."""
        for each in (kind, 1 - kind):
            sizes = np.flatnonzero(self._num_of_size[each] >= _ENOUGH)
            if len(sizes):
                return float(self._corrections[each, sizes[np.abs(sizes - size).argmin()]])
        return 1.0

    def _correct(self, kind: int, size: int, ratio: float) -> None:
        """A pass took `ratio` times what the straight line says."""
        self._num_of_size[kind, size] += 1
        before = self._corrections[kind, size]
        # Far from what was expected an index was built, for instance.
        ratio = min(max(ratio, before / _LARGEST_CORRECTION), before * _LARGEST_CORRECTION)
        self._corrections[kind, size] += (ratio - before) / min(self._num_of_size[kind, size], _CORRECT_OVER)

    @property
    def learns(self) -> bool:
        return True

    def observe(self, rows: int, nodes: int, asked: int, seconds: float, *, is_cold: bool = False) -> float:
        if not is_cold:
            self._observe(rows, nodes, asked, seconds)
        return seconds

    def _observe(self, rows: int, nodes: int, asked: int, seconds: float) -> None:
        features, seconds = _features(rows, nodes, asked), max(seconds, _LEAST_S)
        self.num_passes += 1
        self._num_of_kind[asked > 0] += 1
        self._since_plain += 1
        if asked == 0:
            self._since_plain, self._plain_after = 0, min(2 * self._plain_after, _PLAIN_AFTER[1])
        if self.num_passes <= _SOLVE_EVERY:
            self._begin(features, seconds)
            return
        expected = float(features @ self._weights)
        self._correct(int(asked > 0), _size(rows), seconds / expected)
        if seconds > _LARGEST_SURPRISE * expected:
            self._products, self._sums = _DOUBT * self._products, _DOUBT * self._sums
            self._add(features, seconds, seconds)
        else:
            self._add(features, seconds, expected)
        if self.num_passes % _SOLVE_EVERY == 0:
            self._solve()

    def _begin(self, features: FloatArray, seconds: float) -> None:
        """The guess in the unit of the first passes; with the last of these, what they say."""
        self._first.append((features, seconds))
        usual = (len(self._first) - 1) // 2
        unit = sorted(taken / float(each @ _GUESS) for each, taken in self._first)[usual]
        self._weights = unit * _GUESS
        if len(self._first) < _SOLVE_EVERY:
            return
        self._products[:] = np.diag((_TYPICAL / sorted(taken for _, taken in self._first)[usual]) ** 2) / 2
        self._sums = self._products @ self._weights
        for each, taken in self._first:
            self._add(each, taken, taken)
        self._first.clear()
        self._solve()

    def _add(self, features: FloatArray, seconds: float, scale: float) -> None:
        """Count a pass in which an error of `scale` is an error of 1."""
        kind, features = int(features[_ANY_ASKED] > 0), features / scale
        self._products[kind] = _FORGET * self._products[kind] + np.outer(features, features)
        self._sums[kind] = _FORGET * self._sums[kind] + features * (seconds / scale)

    def _solve(self) -> None:
        """Least squares without negative costs: a feature that would be paid for is left out."""
        products, sums = self._products.sum(0), self._sums.sum(0)
        scale = np.sqrt(np.maximum(np.diag(products), 1e-30))
        products, sums = products / np.outer(scale, scale) + 1e-6 * np.eye(len(_GUESS)), sums / scale
        used = np.ones(len(_GUESS), np.bool_)
        while True:
            solved = np.linalg.solve(products[np.ix_(used, used)], sums[used])
            if (solved >= 0).all():
                break
            used[np.flatnonzero(used)[solved < 0]] = False
        self._weights = np.zeros(len(_GUESS))
        self._weights[used] = solved / scale[used]
        self._weights = np.maximum(self._weights, 1e-6 * self._weights.max())


def _features(rows: int, nodes: int, asked: int) -> FloatArray:
    return np.array([1.0, rows, nodes, asked, asked > 0])


def _size(rows: int) -> int:
    return min(rows.bit_length(), _SIZES - 1)
