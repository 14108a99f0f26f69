"""Advantages from rewards. B = samples, T = response tokens."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Baseline = Literal["group", "leave_one_out", "none"]
Scale = Literal["group", "batch", "none"]


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
