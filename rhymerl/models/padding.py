"""How sequences of many lengths are cut into batches, each padded to its longest, with the least padding."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from rhymerl.compiled import compiled


def best_starts(
    widths: Sequence[int], extras: Sequence[int], *, max_tokens: int | None, overhead: int
) -> list[tuple[int, int]]:
    """Return the batches of n items as (start, end), in order: of all splits that with the fewest tokens.

    The `widths` never grow, a batch is padded to the first of its own, and `extras` are tokens that come without
    padding. A batch has at most `max_tokens`, or one item, and counts for `overhead` tokens more.
    """
    starts = np.empty(len(widths) + 1, np.int64)
    totals = np.concatenate([[0], np.cumsum(np.asarray(extras, np.int64))])
    _fill(np.asarray(widths, np.int64), totals, 2**62 if max_tokens is None else max_tokens, overhead, starts)
    parts, end = [], len(widths)
    while end:
        parts.append((int(starts[end]), end))
        end = int(starts[end])
    return parts[::-1]


@compiled
def _fill(
    widths: npt.NDArray[np.int64],
    totals: npt.NDArray[np.int64],
    max_tokens: int,
    overhead: int,
    starts: npt.NDArray[np.int64],
) -> None:
    """starts[n] = where the last batch begins in the best split of the first n items."""
    cost = np.zeros(len(widths) + 1, np.int64)
    starts[0] = 0
    for end in range(1, len(widths) + 1):
        cost[end] = -1
        for start in range(end - 1, -1, -1):
            tokens = (end - start) * widths[start] + totals[end] - totals[start]
            if tokens > max_tokens and start < end - 1:
                break
            total = cost[start] + tokens + overhead
            if cost[end] < 0 or total < cost[end]:
                cost[end], starts[end] = total, start
