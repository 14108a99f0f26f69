"""Ratios of probabilities and the losses made of them. B = samples, T = response tokens; log-ratios in nats."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

Level = Literal["token", "sequence"]


MOST = 20.0  # nats: the exponential and its square are finite in float32, and no honest ratio is as large


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
