"""The division of samples among ranks."""

from __future__ import annotations

from collections.abc import Sequence

from rhymerl.training.batches import Unit, units
from rhymerl.types import Sample


def balance(num_tokens: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Return the samples' indices for each rank: the longest first, each to the rank with the fewest tokens so far.

    The result follows from the arguments alone. A rank may get nothing; none gets more than the mean and the longest
    sample together.
    """
    dealt: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    for i in sorted(range(len(num_tokens)), key=lambda i: -num_tokens[i]):
        rank = loads.index(min(loads))
        dealt[rank].append(i)
        loads[rank] += num_tokens[i]
    return dealt


def balance_samples(
    samples: Sequence[Sample], chosen: Sequence[int], num_ranks: int, *, shares: bool
) -> list[list[int]]:
    """Assign the samples at `chosen` to ranks, a prompt's to one, unless the other ranks would wait for it."""
    if num_ranks == 1:
        return [list(chosen)]
    whole = _dealt(units(samples, chosen, max_tokens=None, shares=shares), num_ranks)
    if not shares:
        return whole
    single = _dealt(units(samples, chosen, max_tokens=None, shares=False), num_ranks)
    return min(whole, single, key=lambda dealt: max(_tokens(samples, mine) for mine in dealt))


def _dealt(parts: Sequence[Unit], num_ranks: int) -> list[list[int]]:
    dealt = balance([part.tokens for part in parts], num_ranks)
    return [[i for number in mine for i in parts[number].samples] for mine in dealt]


def _tokens(samples: Sequence[Sample], mine: Sequence[int]) -> int:
    """Return how many tokens a rank computes; shared ones count once."""
    return sum(part.tokens for part in units(samples, mine, max_tokens=None, shares=True))
