"""GRPO and its variants: the answers of a group are compared with one another (arXiv 2402.03300)."""

# Annotations are objects here, not strings: see policy_gradient.py.

from dataclasses import dataclass

from torch import Tensor

from rhymerl.algos.base import Batch
from rhymerl.algos.functional import Baseline, Scale, group_advantages, sums_from_here
from rhymerl.algos.policy_gradient import PolicyGradient
from rhymerl.errors import require


@dataclass(kw_only=True, eq=False)
class GRPO(PolicyGradient):
    """An answer's reward less the mean of its group (or of the others in it), over a standard deviation.

    With `kl_in="reward"` a divergence is summed over the answer; without a baseline, over each token and the tokens
    after it, as in REINFORCE++ (arXiv 2501.03262).
    """

    baseline: Baseline = "group"  # what a reward is compared with: the mean of its group, of the others in it, or 0
    scale: Scale = "group"  # the standard deviation to divide by: of the group, or of the step's rewards

    def __post_init__(self) -> None:
        super().__post_init__()
        is_by_token = self.baseline == "none" and self._is_in_reward
        with_these = "none with baseline=none and kl_in=reward, where whiten=true scales rewards and divergence alike"
        require(not is_by_token or self.scale == "none", "scale", self.scale, with_these)

    def check(self, *, group_size: int) -> None:
        if group_size < 2 and (self.baseline != "none" or self.scale == "group"):
            raise ValueError(
                f"group_size={group_size}: {type(self).__name__} compares the answers of a group, so at least 2"
            )

    def advantages(self, batch: Batch) -> Tensor:
        scores, penalties = self.scores(batch), self.kl_penalties(batch)
        if self.baseline != "none":
            scores = scores - penalties.sum(-1)
        values = group_advantages(scores, batch.groups, baseline=self.baseline, scale=self.scale)
        if self.baseline != "none":
            return values[:, None].expand_as(batch.mask)
        return values[:, None] - sums_from_here(penalties)
