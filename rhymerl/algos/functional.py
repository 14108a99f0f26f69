"""The maths of the algorithms as pure functions. B = samples, T = response tokens; log-probs in nats."""

from __future__ import annotations

from torch import Tensor


def group_advantages(rewards: Tensor, groups: Tensor, *, normalize_std: bool, epsilon: float = 1e-4) -> Tensor:
    """Reward minus the mean of its group, over the group's standard deviation if asked for; [B] -> [B].

    GRPO, arXiv 2402.03300, section 4.1.2 (the sample standard deviation); without it Dr.GRPO, arXiv 2503.20783.
    """
    index, count = groups.unique(return_inverse=True, return_counts=True)[1:]
    count = count.to(rewards.dtype)
    mean: Tensor = rewards.new_zeros(len(count)).index_add_(0, index, rewards) / count
    centred: Tensor = rewards - mean[index]
    if not normalize_std:
        return centred
    variance = rewards.new_zeros(len(count)).index_add_(0, index, centred**2) / (count - 1).clamp(min=1)
    deviation: Tensor = variance.sqrt()[index]
    return centred / (deviation + epsilon)


def clipped_surrogate(ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float) -> Tensor:
    """The pessimistic policy-gradient loss of each token: PPO, arXiv 1707.06347, equation 7; all [B, T]."""
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    return -(ratio * advantages).minimum(clipped * advantages)


def k3_divergence(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Schulman's k3 estimate of KL(policy || reference) for each token: r - log r - 1 with r = reference / policy."""
    log_ratio = reference - logprobs
    return log_ratio.exp() - log_ratio - 1


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Sum over the tokens that count; what stands in the others may be anything, NaN included."""
    return values.masked_fill(~mask, 0).sum()
