"""The loss of a mini-batch once more: one token after another, in plain Python, without a tensor."""

from __future__ import annotations

import math
from typing import Any

from rhymerl.algos import Batch


def plain_loss(settings: Any, batch: Batch, logprobs: list[list[float]], entropy: list[list[float]]) -> float:
    """Return the loss of the whole mini-batch, for any settings of a PolicyGradient whose divergence is in the loss."""
    total = 0.0
    num_tokens = int(batch.mask.sum())
    for i in range(len(batch)):
        tokens = [t for t in range(batch.mask.shape[1]) if batch.mask[i, t]]
        now = {t: logprobs[i][t] for t in tokens}
        old = {t: float(batch.proximal_logprobs[i, t]) for t in tokens}
        sampled = {t: float(batch.behaviour_logprobs[i, t]) for t in tokens}
        of_answer = math.exp(sum(now[t] - old[t] for t in tokens) / len(tokens))
        drift = math.exp(sum(old[t] - sampled[t] for t in tokens))
        losses = []
        for t in tokens:
            ratio = math.exp(now[t] - old[t]) if settings.ratio_level == "token" else of_answer
            advantage = float(batch.advantages[i, t])
            weight = math.exp(old[t] - sampled[t]) if settings.correction_level == "token" else drift
            kl = settings.kl_coef * plain_divergence(settings, now[t], float(batch.reference_logprobs[i, t]))
            bounded = plain_weight(settings, weight)
            if settings.kl_unbiased:
                kl *= bounded * math.exp(now[t] - old[t])
            losses.append(bounded * plain_surrogate(settings, ratio, advantage, now[t]) + kl)
        if settings.loss_mean == "token":
            total += sum(losses) / num_tokens
        else:
            count = len(tokens) if settings.loss_mean == "sequence" else int(batch.limits[i])
            total += sum(losses) / count / len(batch)
        total -= settings.entropy_coef * sum(entropy[i][t] for t in tokens) / num_tokens
    return total


def plain_surrogate(settings: Any, ratio: float, advantage: float, logprob: float) -> float:
    clipped = min(max(ratio, 1 - settings.clip_low), 1 + settings.clip_high)
    if settings.surrogate == "cispo":
        return -clipped * advantage * logprob
    gain = min(ratio * advantage, clipped * advantage)
    if settings.dual_clip is not None and advantage < 0:
        gain = max(gain, settings.dual_clip * advantage)
    return -gain


def plain_divergence(settings: Any, logprob: float, reference: float) -> float:
    ratio = math.exp(reference - logprob)
    return {"k1": -math.log(ratio), "k2": math.log(ratio) ** 2 / 2, "k3": ratio - 1 - math.log(ratio)}[
        settings.kl_estimator
    ]


def plain_weight(settings: Any, weight: float) -> float:
    low = -math.inf if settings.correction_floor is None else settings.correction_floor
    high = math.inf if settings.correction_cap is None else settings.correction_cap
    if settings.correction == "none":
        return 1.0
    if settings.correction == "masked":
        return weight if low <= weight <= high else 0.0
    return min(max(weight, low), high)


def plain_advantages(
    rewards: list[list[float]], values: list[list[float]], *, gamma: float, gae_lambda: float
) -> list[list[float]]:
    """GAE as the double sum of its definition: of each answer's tokens, of which there may be any number."""
    result = []
    for reward, value in zip(rewards, values, strict=True):
        following = [*value[1:], 0.0]
        errors = [r + gamma * n - v for r, n, v in zip(reward, following, value, strict=True)]
        result.append(
            [
                sum((gamma * gae_lambda) ** (k - t) * errors[k] for k in range(t, len(errors)))
                for t in range(len(errors))
            ]
        )
    return result
