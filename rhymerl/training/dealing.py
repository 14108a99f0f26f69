"""The division of samples among ranks."""

from __future__ import annotations

from collections.abc import Sequence


def deal(num_tokens: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Return the indices of the samples for each rank: the longest first, each to the rank that has the fewest tokens so far.

    Follows from its arguments alone. A rank may get nothing; none gets more than the mean and the longest sample together.
    """
    dealt: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    for i in sorted(range(len(num_tokens)), key=lambda i: -num_tokens[i]):
        rank = loads.index(min(loads))
        dealt[rank].append(i)
        loads[rank] += num_tokens[i]
    return dealt
