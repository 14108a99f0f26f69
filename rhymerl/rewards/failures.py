"""The count of reward calls that failed: some cost their samples, all of them mean that there is no reward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rhymerl.errors import RewardError
from rhymerl.rewards.base import Reward


@dataclass(frozen=True, slots=True, kw_only=True)
class Failures:
    """Failed calls of rewards on some samples, each of which is one call of each reward."""

    num_samples: int = 0
    num_failed: Mapping[str, int] = field(default_factory=dict)  # by the reward's name, where any has
    first: Mapping[str, str] = field(default_factory=dict)  # what the first of them failed with

    def __add__(self, other: Failures) -> Failures:
        names = {**self.num_failed, **other.num_failed}
        return Failures(
            num_samples=self.num_samples + other.num_samples,
            num_failed={name: self.num_failed.get(name, 0) + other.num_failed.get(name, 0) for name in names},
            first={**other.first, **self.first},
        )

    def check(self, rewards: Sequence[Reward], where: str) -> None:
        """Raise RewardError, with what the first one failed with, when every call of a reward has: `where` says of what."""
        for reward in rewards:
            if self.num_samples and self.num_failed.get(reward.name) == self.num_samples:
                raise RewardError(
                    f"{reward.setting}: all {self.num_samples:,} calls of {where} failed, the first with {self.first[reward.name]}"
                )
