"""PPO: a critic tells what each token was worth (arXiv 1707.06347; for language models arXiv 1909.08593)."""

# Annotations are objects here, not strings: see policy_gradient.py.

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

from rhymerl.algos.base import Batch, Need, PolicyOutput, Totals
from rhymerl.algos.functional import (
    Estimator,
    at_last_token,
    clipped_value_loss,
    explained_variance,
    generalized_advantages,
    masked_sum,
)
from rhymerl.algos.policy_gradient import PolicyGradient
from rhymerl.errors import require


@dataclass(kw_only=True, eq=False)
class PPO(PolicyGradient):
    """Advantages by GAE from token rewards.

    The last token of a turn and of the answer carries their reward, and each token pays its divergence.
    """

    kl_in: Literal["loss", "reward"] = "reward"
    kl_estimator: Estimator = "k1"
    whiten: bool = True
    gamma: float = 1.0
    gae_lambda: float = 0.95
    value_coef: float = 0.5
    value_clip: float | None = 0.2  # the most that a value moves in a step, as far as its loss says
    bootstrap_truncated: bool = False  # behind an answer that was cut off stands the critic's value, not 0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("gamma", "gae_lambda"):
            require(0 <= getattr(self, name) <= 1, name, getattr(self, name), "0 to 1")
        require(self.value_coef >= 0, "value_coef", self.value_coef, "at least 0")
        require(self.value_clip is None or self.value_clip > 0, "value_clip", self.value_clip, "more than 0, or null")
        with_these = "false with mask_truncated=true, where answers that were cut off leave the loss"
        is_lost = self.bootstrap_truncated and self.mask_truncated
        require(not is_lost, "bootstrap_truncated", self.bootstrap_truncated, with_these)

    @property
    def needs(self) -> frozenset[Need]:
        values: set[Need] = {"values", "final_values"} if self.bootstrap_truncated else {"values"}
        return super().needs | values

    def advantages(self, batch: Batch) -> Tensor:
        assert batch.values is not None, "values are computed before the advantages"
        final = None
        if self.bootstrap_truncated:  # the value expected after a cut-off: arXiv 1712.00378
            assert batch.final_values is not None, "they are computed with the values"
            final = batch.final_values.masked_fill(~batch.is_truncated, 0)
        return generalized_advantages(
            self._token_rewards(batch),
            batch.values,
            batch.mask,
            gamma=self.gamma,
            gae_lambda=self.gae_lambda,
            final_values=final,
        )

    def _token_rewards(self, batch: Batch) -> Tensor:
        """Return what each token earned, [B, T]: what was not earned by a turn is earned by the last token."""
        scores, penalties = self.scores(batch), self.kl_penalties(batch)
        if batch.turn_rewards is None:
            return at_last_token(scores, batch.mask) - penalties
        rest = scores - batch.turn_rewards.sum(-1)
        return batch.turn_rewards + at_last_token(rest, batch.mask) - penalties

    def with_returns(self, batch: Batch) -> Batch:
        assert batch.advantages is not None and batch.values is not None
        return replace(batch, returns=(batch.advantages + batch.values).masked_fill(~batch.mask, 0))

    def metrics(self, batch: Batch) -> dict[str, float]:
        assert batch.values is not None and batch.returns is not None
        explained = explained_variance(batch.values, batch.returns, batch.mask)
        found = {} if explained is None else {"critic/vf_explained_var": explained}
        return {**super().metrics(batch), **found}

    def loss(self, batch: Batch, output: PolicyOutput, totals: Totals) -> tuple[Tensor, Mapping[str, Tensor]]:
        policy_loss, found = super().loss(batch, output, totals)
        assert output.values is not None and batch.values is not None and batch.returns is not None
        tokens, is_clipped = clipped_value_loss(output.values, batch.returns, batch.values, clip=self.value_clip)
        value_loss = masked_sum(tokens, batch.mask) / totals.num_tokens
        clipped = (is_clipped & batch.mask).sum() / totals.num_tokens
        total = policy_loss + self.value_coef * value_loss
        of_values = {"critic/vf_loss": value_loss.detach(), "critic/vf_clipfrac": clipped}
        return total, {**found, **of_values, "loss": total.detach()}
