"""The maths of the algorithms as pure functions. B = samples, T = response tokens; log-probs in nats."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

Baseline = Literal["group", "leave_one_out", "none"]
Scale = Literal["group", "batch", "none"]
Estimator = Literal["k1", "k2", "k3"]
Level = Literal["token", "sequence"]
MOST = 20.0  # nats: the exponential and its square are finite in float32, and no honest ratio is as large


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Sum over the tokens that count; what stands in the others may be anything, NaN included."""
    return values.masked_fill(~mask, 0).sum()


# -- advantages, from rewards ------------------------------------------------------------------------------------------


def group_advantages(
    rewards: Tensor, groups: Tensor, *, baseline: Baseline, scale: Scale, epsilon: float = 1e-4
) -> Tensor:
    """Return the rewards less a baseline, over a standard deviation (of the sample, plus epsilon); [B] -> [B].

    Baseline `group` is the group's mean (GRPO, arXiv 2402.03300, section 4.1.2); `leave_one_out` is the mean of the
    group's other members (RLOO, arXiv 2402.14740, section 2). Scale `group` is as in GRPO; `batch` takes all rewards
    (arXiv 2508.08221); `none` is as in Dr.GRPO (arXiv 2503.20783).
    """
    size = group_sums(torch.ones_like(rewards), groups)
    # The mean of equal rewards is often rounded to another number, which a deviation of 0 would then magnify.
    centred = (rewards - group_sums(rewards, groups) / size).masked_fill(_are_equal(rewards, groups), 0)
    if scale == "group":
        deviation = (group_sums(centred**2, groups) / (size - 1).clamp(min=1)).sqrt() + epsilon
    else:
        deviation = _deviation(rewards) + epsilon if scale == "batch" else torch.ones_like(rewards)
    if baseline == "leave_one_out":  # r - (sum - r) / (n - 1) = (r - sum / n) n / (n - 1)
        return centred * size / (size - 1).clamp(min=1) / deviation
    return (centred if baseline == "group" else rewards) / deviation


def group_sums(values: Tensor, groups: Tensor) -> Tensor:
    """Return for each sample the sum over its group; [B] -> [B]."""
    index = groups.unique(return_inverse=True)[1]
    sums: Tensor = values.new_zeros(len(values)).index_add_(0, index, values)
    return sums[index]


def _are_equal(values: Tensor, groups: Tensor) -> Tensor:
    """Return for each sample whether its group has one value alone; [B] -> [B]."""
    index = groups.unique(return_inverse=True)[1]
    least, most = (values.scatter_reduce(0, index, values, how, include_self=False)[index] for how in ("amin", "amax"))
    return least == most


def _deviation(values: Tensor) -> Tensor:
    return values.std() if len(values) > 1 else values.new_zeros(())


def overlong_penalty(lengths: Tensor, limits: Tensor, *, fraction: float) -> Tensor:
    """0 down to -1, linear over the last `fraction` of what an answer may have; [B] tokens -> [B].

    DAPO's soft punishment, arXiv 2503.14476, equation 13, with L_cache = fraction x limit.
    """
    limits = limits.double()
    cache = fraction * limits
    return ((limits - cache - lengths) / cache).clamp(-1, 0)


def at_last_token(values: Tensor, mask: Tensor) -> Tensor:
    """[B] -> [B, T]: a sample's value at its last token that counts, 0 elsewhere."""
    position = torch.arange(1, mask.shape[1] + 1, device=mask.device) * mask
    last = mask & (position == position.max(-1, keepdim=True).values)
    return values[:, None] * last


def sums_from_here(values: Tensor) -> Tensor:
    """Return the sum over each token and those that follow it, [B, T]."""
    return values.flip(-1).cumsum(-1).flip(-1)


def generalized_advantages(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    *,
    gamma: float,
    gae_lambda: float,
    final_values: Tensor | None = None,
) -> Tensor:
    """GAE(gamma, lambda), arXiv 1506.02438, equation 16, from the rewards and values of tokens; all [B, T].

    Masked tokens are skipped, as if they were absent; after the last token the value is 0, or `final_values` [B].
    """
    advantage = values.new_zeros(len(values))
    next_value = advantage if final_values is None else final_values
    columns = []
    for reward, value, counts in zip(rewards.T.flip(0), values.T.flip(0), mask.T.flip(0), strict=True):
        delta = reward + gamma * next_value - value
        advantage = torch.where(counts, delta + gamma * gae_lambda * advantage, advantage)
        next_value = torch.where(counts, value, next_value)
        columns.append(advantage)
    return torch.stack(columns[::-1], dim=1).masked_fill(~mask, 0)


def whitened(values: Tensor, mask: Tensor, *, epsilon: float = 1e-8) -> Tensor:
    """Mean 0 and variance 1 over all tokens that count, 0 elsewhere; [B, T]."""
    counted = values[mask]
    if len(counted) < 2:
        return torch.zeros_like(values)
    scaled = (values - counted.mean()) / (counted.var() + epsilon).sqrt()
    return scaled.masked_fill(~mask, 0)


# -- estimates of the divergence from a reference policy, all [B, T] ---------------------------------------------------


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


# -- ratios of probabilities, and the losses made of them --------------------------------------------------------------


def ratio_of(log_ratio: Tensor) -> Tensor:
    """Return exp(log_ratio), of the same shape and at most e^20.

    It has no gradient at the limit; without the limit, infinity times an advantage of 0 would be NaN.
    """
    return log_ratio.clamp(max=MOST).exp()


def policy_ratio(log_ratio: Tensor, mask: Tensor, *, level: Level) -> Tensor:
    """Return the ratio of each token's probability to that under an earlier policy, [B, T].

    `log_ratio` is 0 outside the mask. Level `sequence` is GSPO's geometric mean over the answer, with the gradient of
    each token's own log-prob (GSPO-token, arXiv 2507.18071, equations 7 and 14).
    """
    if level == "token":
        return ratio_of(log_ratio)
    mean = log_ratio.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
    return ratio_of(mean.detach() + log_ratio - log_ratio.detach())


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> Tensor:
    """Return the pessimistic policy-gradient loss of each token, all [B, T]: PPO, arXiv 1707.06347, equation 7.

    `dual_clip` bounds the ratio where the advantage is negative: arXiv 1912.09729, section "Dual-clip PPO".
    """
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    gain = (ratio * advantages).minimum(clipped * advantages)
    if dual_clip is not None:
        gain = torch.where(advantages < 0, gain.maximum(dual_clip * advantages), gain)
    return -gain


def cispo_surrogate(
    ratio: Tensor, advantages: Tensor, logprobs: Tensor, *, clip_low: float, clip_high: float
) -> Tensor:
    """Log-probs weighted with a clipped ratio that has no gradient, so that no token loses its own; all [B, T].

    CISPO: MiniMax-M1, arXiv 2506.13585, equations 4 and 5.
    """
    return -ratio.detach().clamp(1 - clip_low, 1 + clip_high) * advantages * logprobs


def importance_weight(log_weight: Tensor, *, level: Level) -> Tensor:
    """Return the weight of each token [B, T], or the product over the answer's tokens [B, 1].

    `log_weight` [B, T] is 0 outside the mask.
    """
    return ratio_of(log_weight if level == "token" else log_weight.sum(-1, keepdim=True))


def bounded_weight(
    weight: Tensor, *, masked: bool, floor: float | None = None, cap: float | None = None
) -> tuple[Tensor, Tensor]:
    """Return the weight moved into the bounds, or `masked`: 0 where it is beyond them; and where that is so.

    Moved is truncated importance sampling (V-trace, arXiv 1802.01561, section 4.1), masked is IcePop (arXiv
    2510.18855).
    """
    low, high = -math.inf if floor is None else floor, math.inf if cap is None else cap
    outside = (weight < low) | (weight > high)
    return (weight.masked_fill(outside, 0) if masked else weight.clamp(low, high)), outside


# -- targets and losses of a critic, all [B, T] ------------------------------------------------------------------------


def clipped_value_loss(
    values: Tensor, returns: Tensor, old_values: Tensor, *, clip: float | None
) -> tuple[Tensor, Tensor]:
    """Return half the squared error of each token, and where the clipped value's error is used.

    The worse of the value's and of the value that moved at most `clip` from the old one: baselines, PPO2; a clip of
    None leaves the first.
    """
    error = (values - returns) ** 2
    if clip is None:
        return error / 2, error < 0
    clipped = (old_values + (values - old_values).clamp(-clip, clip) - returns) ** 2
    return error.maximum(clipped) / 2, clipped > error


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float | None:
    """Return 1 - Var(returns - values) / Var(returns) over the mask; None where returns do not vary."""
    wanted, error = returns[mask], (returns - values)[mask]
    if len(wanted) < 2 or not wanted.var() > 0:
        return None
    return float(1 - error.var() / wanted.var())
