"""What is logged of a rollout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from rhymerl.history.answers import are_alike
from rhymerl.rollout.groups import by_prompt
from rhymerl.types import Ratio, Sample


def rollout_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Rewards and lengths of a step's samples, by their names in docs/metrics.md."""
    rewards = np.array([sample.reward for sample in samples])
    lengths = np.array([len(sample) for sample in samples])
    ended = np.array([sample.completion.finish_reason == "stop" for sample in samples])
    groups = by_prompt(samples).values()
    spread = np.array([_deviation([sample.reward for sample in group]) for group in groups])
    metrics = {
        "reward": rewards.mean(),
        "reward_std": spread.mean(),
        "frac_reward_zero_std": (spread == 0).mean(),
        "completions/mean_length": lengths.mean(),
        "completions/min_length": lengths.min(),
        "completions/max_length": lengths.max(),
        "completions/clipped_ratio": 1 - ended.mean(),
    }
    if ended.any():
        metrics["completions/mean_terminated_length"] = lengths[ended].mean()
        metrics["completions/min_terminated_length"] = lengths[ended].min()
        metrics["completions/max_terminated_length"] = lengths[ended].max()
    for name in samples[0].rewards:
        values = np.array([sample.rewards[name] for sample in samples])
        metrics[f"rewards/{name}/mean"] = values.mean()
        metrics[f"rewards/{name}/std"] = values.std()
    return {name: float(value) for name, value in metrics.items()}


def _deviation(rewards: Sequence[float]) -> float:
    """0 for equal rewards, where rounding may leave something of it."""
    return 0.0 if are_alike(rewards) else float(np.std(rewards))


def staleness_metrics(samples: Sequence[Sample], step: int) -> dict[str, float]:
    """How many updates older than the step's policy the policies were that drew its tokens."""
    ages = step - np.concatenate([sample.completion.generated.policy_versions for sample in samples])
    return {"off_policy/staleness/mean": float(ages.mean()), "off_policy/staleness/max": float(ages.max())}


def over_ranks(each: Sequence[Mapping[str, float]], weights: Sequence[float]) -> dict[str, float]:
    """One set of metrics from those of each rank: of ints the sum, of ratios that of their sums, of other floats the weighted mean."""
    names = dict.fromkeys(name for metrics in each for name in metrics)
    return {name: _over_ranks(name, each, weights) for name in names}


def _over_ranks(name: str, each: Sequence[Mapping[str, float]], weights: Sequence[float]) -> float:
    found = [(metrics[name], weight) for metrics, weight in zip(each, weights, strict=True) if name in metrics]
    ratios = [value for value, _ in found if isinstance(value, Ratio)]
    if ratios:
        return float(Ratio(sum(ratio.part for ratio in ratios), sum(ratio.whole for ratio in ratios)))
    if all(isinstance(value, int) for value, _ in found):
        return float(sum(value for value, _ in found))
    total = sum(weight for _, weight in found)
    return sum(value * weight for value, weight in found) / total if total else float(found[0][0])
