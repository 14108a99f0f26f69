"""The maths of the algorithms as pure functions. B = samples, T = response tokens; log-probs in nats."""

from rhymerl.algos.functional.advantages import (
    at_last_token,
    generalized_advantages,
    group_advantages,
    group_sums,
    overlong_penalty,
    sums_from_here,
    whitened,
)
from rhymerl.algos.functional.divergences import divergence, weighted_divergence
from rhymerl.algos.functional.masks import masked_sum
from rhymerl.algos.functional.ratios import (
    bounded_weight,
    cispo_surrogate,
    clipped_surrogate,
    importance_weight,
    policy_ratio,
    ratio_of,
)
from rhymerl.algos.functional.values import clipped_value_loss, explained_variance

__all__ = [
    "at_last_token",
    "bounded_weight",
    "cispo_surrogate",
    "clipped_surrogate",
    "clipped_value_loss",
    "divergence",
    "explained_variance",
    "generalized_advantages",
    "group_advantages",
    "group_sums",
    "importance_weight",
    "masked_sum",
    "overlong_penalty",
    "policy_ratio",
    "ratio_of",
    "sums_from_here",
    "weighted_divergence",
    "whitened",
]
