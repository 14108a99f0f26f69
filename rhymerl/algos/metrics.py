"""Metrics of a loss: sums over a micro-batch's tokens, divided by the totals of the mini-batch."""

from __future__ import annotations

import torch
from torch import Tensor

from rhymerl.algos.base import Batch, Totals
from rhymerl.algos.functional import divergence, masked_sum, ratio_of


@torch.no_grad()
def clipping(
    ratio: Tensor, batch: Batch, totals: Totals, *, low: float, high: float, dual: float | None
) -> dict[str, Tensor]:
    """Return the shares of tokens whose ratio [B, T] was clipped."""
    assert batch.advantages is not None
    below = (ratio < 1 - low) & (batch.advantages < 0) & batch.mask
    above = (ratio > 1 + high) & (batch.advantages > 0) & batch.mask
    either = below | above
    if dual is not None:
        either = either | ((ratio > dual) & (batch.advantages < 0) & batch.mask)
    shares = {"low": below, "high": above, "region": either}
    return {f"clip_ratio/{name}_mean": share.sum() / totals.num_tokens for name, share in shares.items()}


@torch.no_grad()
def off_policy(log_ratio: Tensor, is_bound: Tensor, batch: Batch, totals: Totals) -> dict[str, Tensor]:
    """Return how far the policy is from the one before the step, and how often the correction met its bounds."""
    moved = divergence(torch.zeros_like(log_ratio), log_ratio, estimator="k3")
    return {
        "off_policy/kl": moved.sum() / totals.num_tokens,
        "sampling/bounded_frac": (is_bound & batch.mask).sum() / totals.num_tokens,
    }


@torch.no_grad()
def sampling(logprobs: Tensor, batch: Batch, totals: Totals) -> dict[str, Tensor]:
    """Return how far the trainer's policy is from the behaviour policy, which sampled the tokens.

    The trainer's policy is the one before the step's first update, or the current one where the batch has none of its
    own. Where both had the same weights, they differ by precision alone; truncation, which has been replayed, is in
    neither.
    """
    ours = logprobs if batch.proximal_logprobs is None else batch.proximal_logprobs
    difference = (ours - batch.behaviour_logprobs)[batch.mask]
    ratio, gap = ratio_of(difference), difference.abs()
    is_stale = torch.zeros_like(batch.mask) if batch.is_stale is None else batch.is_stale
    of_age, of_precision = (masked_sum(gap, which[batch.mask]) for which in (is_stale, ~is_stale))
    found = {
        "sampling/importance_sampling_ratio/mean": ratio.sum() / totals.num_tokens,
        "sampling/sampling_logp_difference/mean": gap.sum() / totals.num_tokens,
        "sampling/sampling_logp_difference/precision": of_precision / totals.num_tokens,
        "sampling/sampling_logp_difference/age": of_age / totals.num_tokens,
    }
    if batch.log_masses is not None:
        of_truncation = -masked_sum(batch.log_masses, batch.mask) / totals.num_tokens
        found["sampling/sampling_logp_difference/truncation"] = of_truncation
    if len(ratio):
        found["sampling/importance_sampling_ratio/min"] = ratio.min()
        found["sampling/importance_sampling_ratio/max"] = ratio.max()
        found["sampling/sampling_logp_difference/max"] = gap.max()
    return found
