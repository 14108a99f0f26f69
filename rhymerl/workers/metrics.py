"""Metrics of several engines together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rhymerl.types import Ratio


def over_workers(each: Sequence[Mapping[str, float]], weights: Sequence[float]) -> dict[str, float]:
    """Return the metrics of all workers or ranks: sums of ints, ratios of sums, weighted means of other floats."""
    names = dict.fromkeys(name for metrics in each for name in metrics)
    return {name: _united(name, each, weights) for name in names}


def _united(name: str, each: Sequence[Mapping[str, float]], weights: Sequence[float]) -> float:
    found = [(metrics[name], weight) for metrics, weight in zip(each, weights, strict=True) if name in metrics]
    ratios = [value for value, _ in found if isinstance(value, Ratio)]
    if ratios:
        return float(Ratio(sum(ratio.part for ratio in ratios), sum(ratio.whole for ratio in ratios)))
    if all(isinstance(value, int) for value, _ in found):
        return float(sum(value for value, _ in found))
    if len({value for value, _ in found}) == 1:
        return float(found[0][0])  # as it is, without the mean's rounding
    total = sum(weight for _, weight in found)
    return sum(value * weight for value, weight in found) / total if total else float(found[0][0])
