"""Shared parts of the algorithms: ratio and surrogate, behaviour correction, reference, entropy, means."""

# Annotations are objects here, not strings: constructors in other modules inherit them, and they are the config's
# schema.

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from rhymerl.algos import metrics
from rhymerl.algos.base import Algorithm, Batch, Need, PolicyOutput, Totals
from rhymerl.algos.functional import (
    Estimator,
    Level,
    bounded_weight,
    cispo_surrogate,
    clipped_surrogate,
    divergence,
    importance_weight,
    masked_sum,
    overlong_penalty,
    policy_ratio,
    ratio_of,
    weighted_divergence,
    whitened,
)
from rhymerl.errors import require, require_types


@dataclass(kw_only=True, eq=False)
class PolicyGradient(Algorithm):
    """The sum of the tokens' losses; a subclass says what their advantages are. docs/algorithms.md has the formulas.

    `correction_floor` and `correction_cap` None leave a side open.
    """

    loss_mean: Literal["token", "sequence", "constant"] = "token"  # over tokens, or each answer's mean, or sum / limit
    ratio_level: Level = "token"  # each token has its own policy ratio, or an answer has one (GSPO)
    surrogate: Literal["clip", "cispo"] = "clip"  # PPO's clipped ratio, or CISPO's clipped weight
    clip_low: float = 0.2  # the ratio is clipped below 1 - clip_low
    clip_high: float = 0.2  # the ratio is clipped above 1 + clip_high
    dual_clip: float | None = None  # the most that the ratio counts where the advantage is negative
    entropy_coef: float = 0.0  # of the entropy bonus
    kl_coef: float = 0.0  # of the divergence from the policy that the run started from
    kl_in: Literal["loss", "reward"] = "loss"
    kl_estimator: Estimator = "k3"  # r = reference / policy; k1: -log r, k2: (log r)^2 / 2, k3: r - 1 - log r
    kl_unbiased: bool = True  # in the loss: weighted with the ratio, so that its expected gradient is the divergence's
    kl_target: float | None = None  # nats an answer; in the reward: the coefficient adapts to it
    correction: Literal["none", "truncated", "masked"] = "truncated"  # of the policies that sampled the tokens
    correction_level: Level = "token"  # each token has its own weight, or an answer has their product
    correction_floor: float | None = None  # the least weight; None: no bound
    correction_cap: float | None = 2.0  # the largest weight; None: no bound
    mask_truncated: bool = False  # tokens of answers that were cut off leave the loss
    overlong_fraction: float = 0.0  # the last part of the limit over which the reward falls
    overlong_weight: float = 1.0  # by how much
    whiten: bool = False  # advantages have mean 0 and variance 1 over the step's tokens
    max_kl: float | None = None  # from the policy before the step: beyond it the step's other mini-batches are left out
    _kl_coef: float = field(init=False, repr=False)  # as adapted

    def __post_init__(self) -> None:
        require_types(self)
        for name in ("clip_low", "clip_high", "entropy_coef", "kl_coef", "overlong_weight"):
            require(getattr(self, name) >= 0, name, getattr(self, name), "at least 0")
        require(0 <= self.overlong_fraction <= 1, "overlong_fraction", self.overlong_fraction, "0 to 1")
        require(self.max_kl is None or self.max_kl > 0, "max_kl", self.max_kl, "more than 0")
        dual, target, floor, cap = self.dual_clip, self.kl_target, self.correction_floor, self.correction_cap
        require(dual is None or dual > 1, "dual_clip", dual, "more than 1")
        require(dual is None or self.surrogate == "clip", "dual_clip", dual, f"null with surrogate={self.surrogate}")
        require(target is None or target > 0, "kl_target", target, "more than 0")
        where = "null, unless kl_in=reward and kl_coef is above 0"
        require(target is None or self._is_in_reward, "kl_target", target, where)
        require(floor is None or floor >= 0, "correction_floor", floor, "at least 0, or null")
        require(cap is None or cap >= 0, "correction_cap", cap, "at least 0, or null")
        is_open = floor is None or cap is None or floor < cap
        require(is_open, "correction_floor", floor, f"less than correction_cap={cap}")
        self._kl_coef = float(self.kl_coef)

    # -- what it needs, once a step ------------------------------------------------------------------------------

    @property
    def needs(self) -> frozenset[Need]:
        wanted: dict[Need, bool] = {
            "reference": self.kl_coef > 0,
            "proximal" if self._is_in_reward else "proximal_in_loss": self.correction != "none",
            "entropy_gradient": self.entropy_coef > 0,
        }
        return frozenset(need for need, is_wanted in wanted.items() if is_wanted)

    def scores(self, batch: Batch) -> Tensor:
        """Return the rewards, less for answers that come near their limit; [B]."""
        if not self.overlong_fraction:
            return batch.rewards
        penalties = overlong_penalty(batch.lengths, batch.limits, fraction=self.overlong_fraction)
        return batch.rewards + self.overlong_weight * penalties

    def kl_penalties(self, batch: Batch) -> Tensor:
        """Return what the divergence takes off the reward of each token, [B, T]."""
        if not self._is_in_reward:
            return torch.zeros_like(batch.behaviour_logprobs)
        return self._kl_coef * self._divergence(batch.old_logprobs, batch)

    @property
    def _is_in_reward(self) -> bool:
        return self.kl_in == "reward" and self.kl_coef > 0

    def prepare(self, batch: Batch) -> Batch:
        # A token whose behaviour log-prob is not finite has no ratio to anything. It leaves before advantages are
        # computed, so that PPO's reward stands at a token that counts.
        batch = replace(batch, mask=batch.mask & batch.behaviour_logprobs.isfinite())
        batch = self.with_returns(super().prepare(batch))
        if self.mask_truncated:
            batch = replace(batch, mask=batch.mask & ~batch.is_truncated[:, None])
        if self._is_in_reward:
            batch = replace(batch, divergence=self._divergence(batch.old_logprobs, batch).sum(-1))
        assert batch.advantages is not None
        return replace(batch, advantages=whitened(batch.advantages, batch.mask)) if self.whiten else batch

    def with_returns(self, batch: Batch) -> Batch:
        """Return the batch with `returns` if there is a critic, before its advantages are whitened."""
        return batch

    def metrics(self, batch: Batch) -> dict[str, float]:
        found = {"sampling/nonfinite_tokens": float((~batch.behaviour_logprobs.isfinite()).sum())}
        if self._is_in_reward:
            found |= {"kl": self._total_kl(batch) / max(1, int(batch.mask.sum())), "kl_coef": self._kl_coef}
        return found

    def adapt(self, batch: Batch) -> None:
        """Move the coefficient by at most 2 %, by the divergence in nats an answer: arXiv 1909.08593, section 2.2."""
        if self.kl_target is not None:
            num_answers = max(1, int(batch.mask.any(-1).sum()))
            error = min(0.2, max(-0.2, self._total_kl(batch) / num_answers / self.kl_target - 1))
            self._kl_coef *= 1 + 0.1 * error

    def _total_kl(self, batch: Batch) -> float:
        """Return the sum of the batch's divergences from the reference, found by `prepare` or by `old_logprobs`."""
        of_answers = (
            self._divergence(batch.old_logprobs, batch).sum(-1) if batch.divergence is None else batch.divergence
        )
        return float(of_answers.sum())

    @property
    def may_stop(self) -> bool:
        return self.max_kl is not None or type(self).stops is not PolicyGradient.stops

    def stops(self, metrics: Mapping[str, float]) -> bool:
        return self.max_kl is not None and metrics.get("off_policy/kl", 0.0) > self.max_kl

    def state_dict(self) -> dict[str, Any]:
        return {"kl_coef": self._kl_coef}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.kl_target is not None:  # else the setting is what holds, also when a resumed run has another
            self._kl_coef = float(state["kl_coef"])

    # -- the loss ------------------------------------------------------------------------------------------------

    def loss(self, batch: Batch, output: PolicyOutput, totals: Totals) -> tuple[Tensor, Mapping[str, Tensor]]:
        assert batch.advantages is not None, "advantages are computed before the loss"
        log_ratio = _difference(output.logprobs, batch.old_logprobs, batch.mask)
        ratio = policy_ratio(log_ratio, batch.mask, level=self.ratio_level)
        weight, is_bound = self._correction(batch)
        tokens = self.token_loss(ratio, batch.advantages, output.logprobs)
        found = {
            **metrics.clipping(ratio, batch, totals, low=self.clip_low, high=self.clip_high, dual=self.dual_clip),
            **metrics.off_policy(log_ratio, is_bound, batch, totals),
            **metrics.sampling(output.logprobs, batch, totals),
            "entropy": masked_sum(output.entropy.detach(), batch.mask) / totals.num_tokens,
        }
        tokens = tokens * weight
        if self.kl_in == "loss" and self.kl_coef > 0:
            estimate = self._divergence(output.logprobs, batch)
            found["kl"] = estimate.detach().sum() / totals.num_tokens
            if self.kl_unbiased:
                estimate = weight * weighted_divergence(estimate, ratio_of(log_ratio), estimator=self.kl_estimator)
            tokens = tokens + self.kl_coef * estimate
        total = masked_sum(tokens * self._shares(batch, totals), batch.mask)
        if self.entropy_coef > 0:
            total = total - self.entropy_coef * masked_sum(output.entropy, batch.mask) / totals.num_tokens
        return total, {**found, "loss": total.detach()}

    def token_loss(self, ratio: Tensor, advantages: Tensor, logprobs: Tensor) -> Tensor:
        """Return the loss of each token, [B, T], before correction, divergence and mean; override it for another loss.

        `ratio` is the current policy over that before the update, [B, T], or [B, 1] where `ratio_level` is of whole
        answers; `advantages` [B, T]; `logprobs` [B, T] of the current policy. `ratio` and `logprobs` carry the
        gradient. What is returned outside the mask does not count.
        """
        if self.surrogate == "cispo":
            return cispo_surrogate(ratio, advantages, logprobs, clip_low=self.clip_low, clip_high=self.clip_high)
        return clipped_surrogate(
            ratio, advantages, clip_low=self.clip_low, clip_high=self.clip_high, dual_clip=self.dual_clip
        )

    def _divergence(self, logprobs: Tensor, batch: Batch) -> Tensor:
        """Return the divergence from the reference, [B, T] and 0 outside the mask."""
        assert batch.reference_logprobs is not None, "the reference is asked for in `needs`"
        log_ratio = _difference(logprobs, batch.reference_logprobs, batch.mask)
        return divergence(log_ratio, torch.zeros_like(log_ratio), estimator=self.kl_estimator)

    def _correction(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the weights of the tokens' losses, and where a bound was met; [B, T] or [B, 1].

        Proximal over behaviour policy, beside a ratio of the current over the proximal one: the decoupled objective,
        arXiv 2110.00641, equation 5; AReaL, arXiv 2505.24298, section 5.2.
        """
        log_weight = _difference(batch.old_logprobs, batch.behaviour_logprobs, batch.mask)
        weight = importance_weight(log_weight, level=self.correction_level)
        if self.correction == "none":
            return torch.ones_like(weight), torch.zeros_like(weight, dtype=torch.bool)
        return bounded_weight(
            weight, masked=self.correction == "masked", floor=self.correction_floor, cap=self.correction_cap
        )

    def _shares(self, batch: Batch, totals: Totals) -> Tensor | float:
        """Return the share of each token in the mean, 1 over its denominator, [B, 1] or one number.

        The mean is over all tokens as in DAPO, arXiv 2503.14476, equation 8. In GRPO, arXiv 2402.03300, equation 3, it
        is over each answer's tokens and then over answers. In Dr.GRPO, arXiv 2503.20783, it is over the tokens that
        each answer could have had.
        """
        if self.loss_mean == "token":
            return 1 / totals.num_tokens
        tokens = batch.lengths.clamp(min=1) if self.loss_mean == "sequence" else batch.limits
        return 1 / (tokens[:, None].to(batch.behaviour_logprobs.dtype) * totals.num_samples)


def _difference(left: Tensor, right: Tensor, mask: Tensor) -> Tensor:
    """Return the difference [B, T], 0 outside the mask whatever stands there."""
    return (left - right).masked_fill(~mask, 0)
