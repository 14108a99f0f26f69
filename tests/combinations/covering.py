"""Covering arrays: few rows in which every two values of two factors meet."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations

Value = tuple[str, str]  # a factor, and one of its values
Pair = frozenset[Value]  # of two factors
Row = dict[str, str]  # a value for each factor
Neighbours = Mapping[Value, set[Value]]  # the others of a value's pairs

_CANDIDATES = 30  # rows that are tried before the best of them is taken


def pair(one: Value, two: Value) -> Pair:
    return frozenset((one, two))


def pairs_of(row: Mapping[str, str]) -> set[Pair]:
    """The pairs that meet in a row."""
    return {pair(*values) for values in combinations(row.items(), 2)}


def all_pairs(factors: Mapping[str, Sequence[str]]) -> set[Pair]:
    """Every two values of two factors."""
    return {
        pair((one, left), (two, right))
        for one, two in combinations(factors, 2)
        for left in factors[one]
        for right in factors[two]
    }


def covering_array(factors: Mapping[str, Sequence[str]], *, forbidden: Iterable[Pair] = (), seed: int = 0) -> list[Row]:
    """Rows in which each pair meets but the forbidden ones, which never do; the same for the same seed.

    Greedily the row with the most missing pairs, of some that begin with a missing pair each (AETG: Cohen and others,
    1997). Raises ValueError for a pair that meets in no row because of what is forbidden.
    """
    draw = random.Random(seed)
    refused, missing = _neighbours(forbidden), _neighbours(all_pairs(factors).difference(forbidden))
    rows: list[Row] = []
    while begins := sorted((one, two) for one, others in missing.items() for two in others if one < two):
        chosen = draw.choices(begins, k=_CANDIDATES)
        candidates = [_completed(set(begin), factors, refused, missing, draw) for begin in chosen]
        best = max(
            filter(None, candidates), key=lambda row: sum(len(missing[each] & row) for each in row), default=None
        )
        if best is None:
            raise ValueError(f"{begins[0]}: what is forbidden leaves no row for it")
        for value in best:
            missing[value] -= best
        rows.append({name: dict(best)[name] for name in factors})
    return rows


def _neighbours(pairs: Iterable[Pair]) -> Neighbours:
    found: Neighbours = defaultdict(set)
    for one, two in pairs:
        found[one].add(two)
        found[two].add(one)
    return found


def _completed(
    row: set[Value],
    factors: Mapping[str, Sequence[str]],
    refused: Neighbours,
    missing: Neighbours,
    draw: random.Random,
) -> set[Value] | None:
    """The row with a value for each other factor, in a random order: the one with the most missing pairs; or none."""
    rest = [name for name in factors if name not in dict(row)]
    for name in draw.sample(rest, len(rest)):
        values = [(name, value) for value in draw.sample(factors[name], len(factors[name]))]
        allowed = [value for value in values if not refused[value] & row]
        if not allowed:
            return None
        row.add(max(allowed, key=lambda value: len(missing[value] & row)))
    return row
