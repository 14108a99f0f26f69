"""On-policy distillation: a teacher judges the tokens that the policy has sampled."""

# Annotations are objects here, not strings: see policy_gradient.py.

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rhymerl.algos.base import Batch, Need, PolicyOutput, Totals
from rhymerl.algos.functional import masked_sum
from rhymerl.algos.grpo import GRPO
from rhymerl.errors import require


@dataclass(kw_only=True, eq=False)
class Distill(GRPO):
    """The divergence of the policy from a teacher, KL(policy || teacher), at each token of the policy's own answers.

    It is estimated by the tokens that were sampled, and is then their advantage (arXiv 2306.08543), or computed over
    the whole vocabulary and differentiated (arXiv 2306.13649). GRPO's advantages are added `reward_weight` times; at 0
    a run needs no rewards.
    """

    over: Literal["sampled", "vocabulary"] = "sampled"
    reward_weight: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.reward_weight >= 0, "reward_weight", self.reward_weight, "at least 0")
        teaches_twice = (
            "0 with Distill, whose reference is the teacher: reward_weight says what rewards count beside it"
        )
        require(self.kl_coef == 0, "kl_coef", self.kl_coef, teaches_twice)

    @property
    def needs(self) -> frozenset[Need]:
        is_sampled = self.over == "sampled"
        wanted: dict[Need, bool] = {
            "reference": is_sampled,
            "proximal": is_sampled and self.correction != "none",
            "divergence": not is_sampled,
        }
        return super().needs.union(need for need, is_wanted in wanted.items() if is_wanted)

    @property
    def needs_teacher(self) -> bool:
        return True

    @property
    def learns_from_rewards(self) -> bool:
        return self.reward_weight > 0

    def check(self, *, group_size: int) -> None:
        if self.learns_from_rewards:
            super().check(group_size=group_size)

    def advantages(self, batch: Batch) -> Tensor:
        of_rewards = torch.zeros_like(batch.behaviour_logprobs)
        if self.learns_from_rewards:
            of_rewards = self.reward_weight * super().advantages(batch)
        return of_rewards if self.over == "vocabulary" else of_rewards - self._gap(batch)

    def metrics(self, batch: Batch) -> dict[str, float]:
        found = super().metrics(batch)
        if self.over == "sampled":
            found["kl"] = float(self._gap(batch).sum()) / max(1, int(batch.mask.sum()))
        return found

    def loss(self, batch: Batch, output: PolicyOutput, totals: Totals) -> tuple[Tensor, Mapping[str, Tensor]]:
        loss, found = super().loss(batch, output, totals)
        if self.over == "sampled":
            return loss, found
        assert output.divergence is not None, "the divergence is asked for in `needs`"
        loss = loss + masked_sum(output.divergence * self._shares(batch, totals), batch.mask)
        kl = masked_sum(output.divergence.detach(), batch.mask) / totals.num_tokens
        return loss, {**found, "kl": kl, "loss": loss.detach()}

    def _gap(self, batch: Batch) -> Tensor:
        """Return log policy - log teacher of the sampled tokens, [B, T], 0 outside the mask."""
        assert batch.reference_logprobs is not None, "the reference is asked for in `needs`"
        return (batch.old_logprobs - batch.reference_logprobs).masked_fill(~batch.mask, 0)
