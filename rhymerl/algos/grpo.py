"""GRPO: group-relative advantages, a clipped ratio, and an optional pull towards a reference (arXiv 2402.03300)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from rhymerl.algos.base import Algorithm, Batch, Need, PolicyOutput, Totals
from rhymerl.algos.functional import clipped_surrogate, group_advantages, k3_divergence, masked_sum
from rhymerl.errors import ConfigError


class GRPO(Algorithm):
    """The loss is a mean over all trained tokens of the mini-batch (DAPO's, arXiv 2503.14476, equation 8).

    `clip_high` above `clip_low` is DAPO's clip-higher; `normalize_std=False` is Dr.GRPO's advantage;
    `kl_coef` weighs the k3 divergence from the policy that the run started from.
    """

    def __init__(
        self,
        *,
        clip_low: float = 0.2,
        clip_high: float = 0.2,
        normalize_std: bool = True,
        kl_coef: float = 0.0,
    ) -> None:
        for name, value in (("clip_low", clip_low), ("clip_high", clip_high), ("kl_coef", kl_coef)):
            if value < 0:
                raise ConfigError(f"algo.{name}={value}: expected 0 or more")
        self.clip_low = clip_low
        self.clip_high = clip_high
        self.normalize_std = normalize_std
        self.kl_coef = kl_coef

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset({"reference"} if self.kl_coef > 0 else ())

    def check(self, *, group_size: int) -> None:
        if group_size < 2:
            raise ConfigError(
                f"rollout.group_size={group_size}: {type(self).__name__} compares the answers of a group, so at least 2"
            )

    def advantages(self, batch: Batch) -> Tensor:
        values = group_advantages(batch.rewards, batch.groups, normalize_std=self.normalize_std)
        return values[:, None].expand_as(batch.mask)

    def loss(self, batch: Batch, output: PolicyOutput, totals: Totals) -> tuple[Tensor, Mapping[str, Tensor]]:
        assert batch.advantages is not None, "advantages are computed before the loss"
        difference = (output.logprobs - batch.behaviour_logprobs).masked_fill(~batch.mask, 0)
        ratio = difference.exp()
        loss = clipped_surrogate(ratio, batch.advantages, clip_low=self.clip_low, clip_high=self.clip_high)
        metrics = ratio_metrics(ratio, difference, batch, totals, clip_low=self.clip_low, clip_high=self.clip_high)
        if batch.reference_logprobs is not None:
            divergence = k3_divergence(output.logprobs, batch.reference_logprobs)
            loss = loss + self.kl_coef * divergence
            metrics["kl"] = masked_sum(divergence.detach(), batch.mask) / totals.num_tokens
        metrics["entropy"] = masked_sum(output.entropy.detach(), batch.mask) / totals.num_tokens
        total = masked_sum(loss, batch.mask) / totals.num_tokens
        return total, {**metrics, "loss": total.detach()}


@torch.no_grad()
def ratio_metrics(
    ratio: Tensor, difference: Tensor, batch: Batch, totals: Totals, *, clip_low: float, clip_high: float
) -> dict[str, Tensor]:
    """How far the policy is from the one that drew the tokens; ratio and log-ratio `difference` are [B, T]."""
    assert batch.advantages is not None
    low = (ratio < 1 - clip_low) & (batch.advantages < 0) & batch.mask
    high = (ratio > 1 + clip_high) & (batch.advantages > 0) & batch.mask
    inside, gap = ratio[batch.mask], difference[batch.mask].abs()
    metrics = {
        "clip_ratio/low_mean": low.sum() / totals.num_tokens,
        "clip_ratio/high_mean": high.sum() / totals.num_tokens,
        "clip_ratio/region_mean": (low | high).sum() / totals.num_tokens,
        "sampling/importance_sampling_ratio/mean": inside.sum() / totals.num_tokens,
        "sampling/sampling_logp_difference/mean": gap.sum() / totals.num_tokens,
    }
    if len(inside):
        metrics["sampling/importance_sampling_ratio/min"] = inside.min()
        metrics["sampling/importance_sampling_ratio/max"] = inside.max()
        metrics["sampling/sampling_logp_difference/max"] = gap.max()
    return metrics
