"""The loss of a mini-batch once more: one token after another, in plain Python, without a tensor."""

from __future__ import annotations

import math
from statistics import fmean, stdev
from typing import Any

from rhymerl.algos import Batch


def plain_loss(settings: Any, batch: Batch, logprobs: list[list[float]], entropy: list[list[float]]) -> float:
    """Return the loss of the whole mini-batch, for any settings of a PolicyGradient whose divergence is in the loss."""
    total = 0.0
    counted = (batch.mask & batch.behaviour_logprobs.isfinite()).tolist()
    num_tokens = max(1, sum(map(sum, counted)))
    for i in range(len(batch)):
        tokens = [t for t, counts in enumerate(counted[i]) if counts]
        now = {t: logprobs[i][t] for t in tokens}
        old = {t: float(batch.proximal_logprobs[i, t]) for t in tokens}
        sampled = {t: float(batch.behaviour_logprobs[i, t]) for t in tokens}
        of_answer = plain_ratio(sum(now[t] - old[t] for t in tokens) / max(1, len(tokens)))
        drift = plain_ratio(sum(old[t] - sampled[t] for t in tokens))
        losses = []
        for t in tokens:
            ratio = plain_ratio(now[t] - old[t]) if settings.ratio_level == "token" else of_answer
            advantage = float(batch.advantages[i, t])
            weight = plain_ratio(old[t] - sampled[t]) if settings.correction_level == "token" else drift
            kl = settings.kl_coef * plain_divergence(settings, now[t], float(batch.reference_logprobs[i, t]))
            bounded = plain_weight(settings, weight)
            if settings.kl_unbiased:
                kl *= bounded * plain_ratio(now[t] - old[t])
            losses.append(bounded * plain_surrogate(settings, ratio, advantage, now[t]) + kl)
        if settings.loss_mean == "token":
            total += sum(losses) / num_tokens
        else:
            count = max(1, len(tokens)) if settings.loss_mean == "sequence" else int(batch.limits[i])
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
    difference = reference - logprob
    k3 = plain_ratio(difference) - 1 - min(difference, 20.0)
    return {"k1": -difference, "k2": difference**2 / 2, "k3": k3}[settings.kl_estimator]


def plain_ratio(log_ratio: float) -> float:
    return math.exp(min(log_ratio, 20.0))


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
        following = [*value[1:], 0.0][: len(value)]  # an answer may have none
        errors = [r + gamma * n - v for r, n, v in zip(reward, following, value, strict=True)]
        result.append(
            [
                sum((gamma * gae_lambda) ** (k - t) * errors[k] for k in range(t, len(errors)))
                for t in range(len(errors))
            ]
        )
    return result


def plain_group_advantages(rewards: list[float | None], groups: list[int], settings: Any) -> list[float | None]:
    """Return a GRPO's advantage of each answer; None where it has no reward, and is not compared with."""
    known = [reward for reward in rewards if reward is not None]
    result: list[float | None] = []
    for reward, group in zip(rewards, groups, strict=True):
        peers = [other for other, its in zip(rewards, groups, strict=True) if its == group and other is not None]
        if reward is None:
            result.append(None)
        elif settings.baseline != "none" and min(peers) == max(peers):  # whatever the rounding of their mean
            result.append(0.0)
        else:
            base = {"group": fmean(peers), "none": 0.0}.get(settings.baseline)
            if base is None:
                base = (math.fsum(peers) - reward) / (len(peers) - 1)
            compared = {"group": peers, "batch": known, "none": []}[settings.scale]
            deviation = stdev(compared) if len(compared) > 1 else 0.0
            result.append((reward - base) / (1.0 if settings.scale == "none" else deviation + 1e-4))
    return result


def plain_whitened(values: list[list[float]]) -> list[list[float]]:
    counted = [value for line in values for value in line]
    if len(counted) < 2:
        return [[0.0] * len(line) for line in values]
    return [[(value - fmean(counted)) / math.sqrt(stdev(counted) ** 2 + 1e-8) for value in line] for line in values]


def plain_value_loss(value: float, old: float, wanted: float, clip: float | None) -> float:
    bounded = value if clip is None else old + min(max(value - old, -clip), clip)
    return max((value - wanted) ** 2, (bounded - wanted) ** 2) / 2
