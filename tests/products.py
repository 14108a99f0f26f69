"""Products of parameters: the default run takes a few of their combinations, and `make test-slow` the others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import combinations, product
from typing import Any

import pytest

Axis = Iterable[Any]  # values; a mapping's are named by its keys


def pairs_first(*axes: Axis) -> list[Any]:
    """All combinations; those that are not needed for each two values to meet in one that is run are slow."""
    return _slow_beyond(axes, parts=2)


def values_first(*axes: Axis) -> list[Any]:
    """All combinations; those that are not needed for each value to be in one that is run are slow."""
    return _slow_beyond(axes, parts=1)


def _slow_beyond(axes: Iterable[Axis], *, parts: int) -> list[Any]:
    named = [_named(axis) for axis in axes]
    places = list(product(*(range(len(axis)) for axis in named)))
    meets = {place: set(combinations(enumerate(place), parts)) for place in places}
    chosen, missing = set(), set().union(*meets.values())
    while missing:  # greedily the one that has most of them, of equals the first
        best = max(places, key=lambda place: len(meets[place] & missing))
        chosen.add(best)
        missing -= meets[best]
    return [
        _case([axis[i] for axis, i in zip(named, each, strict=True)], is_slow=each not in chosen) for each in places
    ]


def _named(axis: Axis) -> list[tuple[str, Any]]:
    if isinstance(axis, Mapping):
        return list(axis.items())
    return [(getattr(value, "__name__", str(value)), value) for value in axis]


def _case(parts: list[tuple[str, Any]], *, is_slow: bool) -> Any:
    names, values = zip(*parts, strict=True)
    return pytest.param(*values, id="-".join(names), marks=pytest.mark.slow if is_slow else ())
