"""Estimates of the divergence from a reference policy, from the tokens that were sampled. All [B, T], in nats."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from rhymerl.algos.functional.ratios import MOST

Estimator = Literal["k1", "k2", "k3"]


def divergence(logprobs: Tensor, reference: Tensor, *, estimator: Estimator) -> Tensor:
    """Estimate KL(policy || reference) for tokens sampled from the policy: joschu.net/blog/kl-approx.html.

    With r = reference / policy, k1 = -log r, k2 = (log r)^2 / 2, k3 = r - 1 - log r with log r at most 20.
    """
    log_ratio = reference - logprobs
    if estimator == "k1":
        return -log_ratio
    if estimator == "k2":
        return log_ratio**2 / 2
    log_ratio = log_ratio.clamp(max=MOST)  # of both terms: of one alone the gradient would point the other way
    return log_ratio.exp() - 1 - log_ratio


def weighted_divergence(estimate: Tensor, ratio: Tensor, *, estimator: Estimator) -> Tensor:
    """Return `estimate` times policy / behaviour, so that the expected gradient is that of KL(policy || reference).

    As a loss, k1 alone has the expected gradient 0, and k3 the gradient of KL(reference || policy). The weight's own
    gradient corrects both: DeepSeek-V3.2, arXiv 2512.02556, "unbiased KL estimate". The gradient of k2 is right
    already, so its weight is a constant.
    """
    return estimate * (ratio.detach() if estimator == "k2" else ratio)
