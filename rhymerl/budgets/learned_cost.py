"""The cost of a pass, learned from the passes so far."""

from __future__ import annotations

from itertools import accumulate

import numpy as np

from rhymerl.compiled import compiled
from rhymerl.costs import Amounts, PassCost
from rhymerl.types import FloatArray, IndexArray

_FORGET = 0.998  # a pass; half of what is known is of the last 350 of its kind
_BEGIN = 8  # passes before the first solution
_SOLVE_EVERY = 32  # passes at most; at first whenever there are a quarter more
_PLAIN_AFTER = 4, 128  # passes with drafts, at first and later: those without them where they pay lose little
_ENOUGH = 3  # passes of a kind
NUM_COLD = 2  # passes without drafts right behind drafts that take longer than in a row: the model has left the caches
_MOST_COLD = 9  # passes without drafts of a size: where they never come in a row, more of them teach nothing either
_SIZES = 24  # of batches, by the binary digits of their rows

# The curve is straight between these numbers of tokens, and beyond the last.
_KNOTS = np.array([0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024], np.float64)
_CURVE = np.append(_KNOTS, 1e9)  # the last segment has no end
_WIDTHS = np.diff(_CURVE)
_NUM_SEGMENTS = len(_KNOTS)
# Features: 1, the tokens in each segment of the curve, and then these.
_ROWS, _NODES, _ASKED, _ANY_ASKED, _SEEN, _PROMPT, _ANY_PROMPT = range(_NUM_SEGMENTS + 1, _NUM_SEGMENTS + 8)
_NUM_FEATURES = _ANY_PROMPT + 1
# Before the first pass, in whatever unit: nodes are held to be cheap, so that they are tried.
_GUESS = np.zeros(_NUM_FEATURES)
_GUESS[: _NUM_SEGMENTS + 1] = 1 / 128
_GUESS[[0, _ASKED, _ANY_ASKED, _PROMPT]] = 1.0, 1 / 512, 1 / 8, 1 / 128
_TYPICAL = np.zeros(_NUM_FEATURES)  # features of the pass that the guess counts for afterwards
_TYPICAL[[0, _ASKED, _ANY_ASKED, _PROMPT]] = 0.25, 8.0, 0.25, 0.25
_TYPICAL[1 : _NUM_SEGMENTS + 1] = 0.25
# Passes that it counts for that a segment's slope is its neighbour's: what has not been seen is like what has.
_SMOOTH = 0.5
# Probes alone cannot tell what asking costs in a pass from what it costs for a request; then a pass costs as much as so
# many of these.
_REQUESTS_A_PASS = 24
# Nor what a node costs beside what any token does: nothing, until they show it. If so many cost a pass more, the error
# is a pass.
_NODES_A_PASS = 512
_LARGEST_SURPRISE = 3.0  # times what was expected
_DOUBT = 0.9  # what is left of all that is known after a larger one: many in a row are another machine
_LATELY = 0.01  # of the machine's pace, a pass
_LEAK = 0.9999  # of its logarithm, a pass: what stays goes into the weights
_ONE_BY_ONE = 16  # passes before many are taken at once
_LEAST_S = 1e-9


class LearnedCost(PassCost):
    """Learns seconds / pace = curve(rows + nodes) + a rows + b nodes + c asked + d seen + e prompt tokens.

    For asking at all, and for prompts at all, there is a term each. It does so by least squares of relative errors,
    with forgetting. The curve is straight between powers of two and never falls. Tokens of prompts are not on it: to
    admit a request has a cost of its own, for which the curve would charge nodes. `seen` are the keys that rows and
    nodes attend to, summed. The pace is the measured over the expected time of recent passes of both kinds: where a
    machine slows down, a kind of passes that it has not had since is expected to take longer, too. Before the first
    pass nodes are held to be cheap, so that they are tried. What takes far longer than expected (a compiler ran, or
    another program) weighs little, as long as that is rare. Passes with cold processor caches teach nothing: the first
    with drafts after a pause of the drafter, and the first `NUM_COLD` without drafts after drafts. With asking=False
    the seconds leave out the drafter's, and to ask it costs nothing.
    """

    def __init__(self, *, asking: bool = True) -> None:
        self._may_cost = np.ones(_NUM_FEATURES, np.bool_)
        self._may_cost[[_ASKED, _ANY_ASKED]] = asking
        self._guess = self._may_cost * _GUESS
        self._take(self._guess)
        self._pace = 1.0
        self._seen_per_token = 0.0  # lately
        self._first: list[tuple[FloatArray, float]] = []  # features and seconds, until there are enough to solve for
        # One for passes for which the drafter was left alone, and one for the others. Each forgets by its own passes:
        # while one kind is all there is, what is known of the other must not fade, because the two are compared.
        self._products = np.zeros((2, _NUM_FEATURES, _NUM_FEATURES))
        self._sums = np.zeros((2, _NUM_FEATURES))
        self.num_passes = 0
        self._solve_at = 0  # passes
        self._num_of_kind = [0, 0]  # passes without and with asking
        self._num_of_size = np.zeros((2, _SIZES), np.int64)
        self._num_cold_of_size = np.zeros(_SIZES, np.int64)  # passes without drafts that taught nothing
        self._since_plain = 0
        self._plain_after = _PLAIN_AFTER[0]
        self._num_plain = 0  # observed passes in a row without drafts
        self._is_behind_pause = False

    def wants_plain(self, rows: int) -> bool:
        """Return whether a pass should go without drafts: where they always pay, there would be no baseline."""
        size = _size(rows)
        plain, asked = self._num_of_size[:, size]
        is_new = plain < min(asked, _ENOUGH) and self._num_cold_of_size[size] < _MOST_COLD
        return self._since_plain >= self._plain_after or bool(is_new)

    @property
    def is_known(self) -> bool:
        return self.num_passes >= _BEGIN and min(self._num_of_kind) >= _ENOUGH

    def seconds(
        self, rows: Amounts, nodes: Amounts, asked: Amounts, *, prompt_tokens: Amounts = 0, seen: Amounts | None = None
    ) -> FloatArray:
        """Return the time of passes. Without `seen` each row and node is held to see as much as in the last pass."""
        tokens, weights = rows + np.asarray(nodes, np.float64), self._weights
        sees = self._seen_per_token * tokens if seen is None else seen
        return np.asarray(
            self._pace
            * (
                np.interp(tokens, _CURVE, self._values)
                + weights[_ROWS] * rows
                + weights[_NODES] * nodes
                + weights[_ASKED] * asked
                + weights[_ANY_ASKED] * (np.asarray(asked) > 0)
                + weights[_SEEN] * sees
                + weights[_PROMPT] * prompt_tokens
                + weights[_ANY_PROMPT] * (np.asarray(prompt_tokens) > 0)
            )
        )

    @property
    def learns(self) -> bool:
        return True

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
        is_warm = self._is_warm(asked > 0)
        if seconds is None:
            return super().observe(rows, nodes, asked, seconds)
        if is_warm:
            self._seen_per_token = seen / max(rows + nodes, 1)
            self._num_of_size[int(asked > 0), _size(rows)] += 1
            self._observe(_features(rows, nodes, asked, prompt_tokens, seen), max(seconds, _LEAST_S))
        elif not asked:
            self._num_cold_of_size[_size(rows)] += 1
        return seconds

    def note_pause(self) -> None:
        self._is_behind_pause = True

    def _is_warm(self, is_asked: bool) -> bool:
        """Count a pass; return whether it comes behind enough passes of its kind."""
        is_behind_pause, self._is_behind_pause = self._is_behind_pause, False
        self._num_plain = 0 if is_asked else self._num_plain + 1
        return not is_behind_pause if is_asked else self._num_plain > NUM_COLD

    def observe_all(
        self,
        rows: IndexArray,
        nodes: IndexArray,
        asked: IndexArray,
        seconds: FloatArray,
        *,
        prompt_tokens: IndexArray,
        seen: IndexArray,
    ) -> None:
        """Observe many passes in their order, [P] each, at the price of one or two."""
        warm = np.array([self._is_warm(is_asked) for is_asked in (asked > 0).tolist()], np.bool_)
        features = _features(rows, nodes, asked, prompt_tokens, seen)[warm]
        seconds = np.maximum(seconds, _LEAST_S)[warm]
        alone = max(_ONE_BY_ONE - self.num_passes, 0)
        for each, taken in zip(features[:alone], seconds[:alone], strict=True):
            self._observe(each, float(taken))
        features, seconds = features[alone:], seconds[alone:]
        if len(features) == 0:
            return
        expected = features @ self._weights
        *paces, self._pace = accumulate((seconds / expected).tolist(), _next_pace, initial=self._pace)
        seconds = seconds / paces
        scale = np.where(seconds > _LARGEST_SURPRISE * expected, seconds, expected)
        for kind in (0, 1):
            of_kind = features[:, _ANY_ASKED] == kind
            count = int(of_kind.sum())
            weight = _FORGET ** np.arange(count)[::-1]
            scaled = features[of_kind] / scale[of_kind, None]
            left = _FORGET**count
            self._products[kind] = left * self._products[kind] + scaled.T @ (weight[:, None] * scaled)
            self._sums[kind] = left * self._sums[kind] + scaled.T @ (weight * (seconds / scale)[of_kind])
            self._num_of_kind[kind] += count
        self.num_passes += len(features)
        self._solve()

    def _observe(self, features: FloatArray, seconds: float) -> None:
        is_asked = bool(features[_ANY_ASKED])
        self.num_passes += 1
        self._num_of_kind[is_asked] += 1
        self._since_plain += 1
        if not is_asked:
            self._since_plain, self._plain_after = 0, min(2 * self._plain_after, _PLAIN_AFTER[1])
        if self.num_passes <= _BEGIN:
            self._begin(features, seconds)
            return
        expected = float(features @ self._weights)
        pace, self._pace = self._pace, _next_pace(self._pace, seconds / expected)
        seconds /= pace
        if seconds > _LARGEST_SURPRISE * expected:
            self._products, self._sums = _DOUBT * self._products, _DOUBT * self._sums
            self._add(features, seconds, seconds)
        else:
            self._add(features, seconds, expected)
        if self.num_passes >= self._solve_at:
            self._solve()

    def _begin(self, features: FloatArray, seconds: float) -> None:
        """Scale the guess by the median of the first passes; once there are enough, fit the weights to them."""
        self._first.append((features, seconds))
        usual = (len(self._first) - 1) // 2
        unit = sorted(taken / float(each @ self._guess) for each, taken in self._first)[usual]
        self._take(unit * self._guess)
        if len(self._first) < _BEGIN:
            return
        typical = sorted(taken for _, taken in self._first)[usual]
        self._products[:] = np.diag((_TYPICAL / typical) ** 2) / 2
        self._sums = self._products @ self._weights
        self._products += _smoothness(typical) / 2
        for each, taken in self._first:
            self._add(each, taken, taken)
        self._first.clear()
        self._solve()

    def _add(self, features: FloatArray, seconds: float, scale: float) -> None:
        """Count a pass in which an error of `scale` is an error of 1."""
        kind = int(features[_ANY_ASKED])
        _count(self._products[kind], self._sums[kind], features / scale, seconds / scale)

    def _solve(self) -> None:
        """Least squares without negative costs: a feature that would be paid for is left out."""
        self._solve_at = self.num_passes + min(max(self.num_passes // 4, 1), _SOLVE_EVERY)
        products, sums = self._products.sum(0), self._sums.sum(0)
        scale = np.sqrt(np.maximum(np.diag(products), 1e-30))
        products, sums = products / np.outer(scale, scale) + 1e-6 * np.eye(len(sums)), sums / scale
        used = self._may_cost.copy()
        while True:
            solved = np.linalg.solve(products[np.ix_(used, used)], sums[used])
            if (solved >= 0).all():
                break
            used[np.flatnonzero(used)[solved < 0]] = False
        weights = np.zeros(len(sums))
        weights[used] = solved / scale[used]
        weights[0] = max(weights[0], 1e-6 * weights.max())
        self._take(weights)

    def _take(self, weights: FloatArray) -> None:
        self._weights, self._values = weights, _values(weights)


def _next_pace(pace: float, taken: float) -> float:
    """Return the pace after a pass that took `taken` times what was expected at a pace of 1."""
    surprise = taken / pace
    if surprise <= _LARGEST_SURPRISE:
        pace *= 1 + _LATELY * (surprise - 1)
    return float(pace**_LEAK)


@compiled
def _count(products: FloatArray, sums: FloatArray, features: FloatArray, seconds: float) -> None:
    """Add a pass to the sums of products [F, F] and [F], of which a little is forgotten."""
    for i in range(len(features)):
        sums[i] = _FORGET * sums[i] + features[i] * seconds
        for j in range(len(features)):
            products[i, j] = _FORGET * products[i, j] + features[i] * features[j]


def _features(
    rows: int | IndexArray,
    nodes: int | IndexArray,
    asked: int | IndexArray,
    prompt_tokens: int | IndexArray,
    seen: int | IndexArray,
) -> FloatArray:
    """Return the features of a pass, [F], or of many, [P, F]."""
    tokens = np.asarray(rows + nodes, np.float64)
    features = np.empty((*tokens.shape, _NUM_FEATURES))
    features[..., 0] = 1.0
    segments = features[..., 1 : _NUM_SEGMENTS + 1]
    np.subtract(tokens[..., None], _KNOTS, out=segments)
    np.clip(segments, 0.0, _WIDTHS, out=segments)
    features[..., _ROWS], features[..., _NODES] = rows, nodes
    features[..., _ASKED], features[..., _ANY_ASKED] = asked, np.greater(asked, 0)
    features[..., _SEEN] = seen
    features[..., _PROMPT], features[..., _ANY_PROMPT] = prompt_tokens, np.greater(prompt_tokens, 0)
    return features


def _values(weights: FloatArray) -> FloatArray:
    rises: FloatArray = np.cumsum(_WIDTHS * weights[1 : _NUM_SEGMENTS + 1])
    return np.concatenate([weights[:1], weights[0] + rises])


def _smoothness(typical_s: float) -> FloatArray:
    """Return the penalty on what passes have not shown: neighbours' slopes agree; asking and nodes cost as above."""
    products = np.zeros((_NUM_FEATURES, _NUM_FEATURES))
    for segment in range(1, _NUM_SEGMENTS):
        difference = np.zeros(_NUM_FEATURES)
        difference[segment], difference[segment + 1] = 1.0, -1.0
        products += _SMOOTH * np.outer(difference, difference) * (_KNOTS[segment] / typical_s) ** 2
    difference = np.zeros(_NUM_FEATURES)
    difference[_ANY_ASKED], difference[_ASKED] = 1.0, -_REQUESTS_A_PASS
    products[_NODES, _NODES] += _SMOOTH * (_NODES_A_PASS / typical_s) ** 2
    return products + _SMOOTH * np.outer(difference, difference) / typical_s**2


def _size(rows: int) -> int:
    return min(rows.bit_length(), _SIZES - 1)
