"""The count of reward calls that failed: some cost their samples, all of them mean that there is no reward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rhymerl.errors import RewardError
from rhymerl.rewards.base import Reward

MANY = 0.05  # of the calls of a reward, or of the answers of a run


@dataclass(frozen=True, slots=True, kw_only=True)
class Failures:
    """Failed calls of rewards on some samples, each of which is one call of each reward."""

    num_samples: int = 0
    num_failed: Mapping[str, int] = field(default_factory=dict)  # by the reward's name, where any has
    num_absent: Mapping[str, int] = field(default_factory=dict)  # calls that did not apply, likewise
    num_unrewarded: int = 0  # samples to which no reward applies
    first: Mapping[str, str] = field(default_factory=dict)  # what the first of them failed with
    num_dropped: Mapping[str, int] = field(default_factory=dict)  # failed calls that gave no default, by name

    def __add__(self, other: Failures) -> Failures:
        return Failures(
            num_samples=self.num_samples + other.num_samples,
            num_failed=dict(Counter(self.num_failed) + Counter(other.num_failed)),
            num_absent=dict(Counter(self.num_absent) + Counter(other.num_absent)),
            num_unrewarded=self.num_unrewarded + other.num_unrewarded,
            first={**other.first, **self.first},
            num_dropped=dict(Counter(self.num_dropped) + Counter(other.num_dropped)),
        )

    def num_calls(self, name: str) -> int:
        """Return the calls of a reward that applied to their samples."""
        return self.num_samples - self.num_absent.get(name, 0)

    def sentences(self) -> list[str]:
        """Return what to say of each reward that fails more often than now and then, and where none applies."""
        found = [
            f"rewards.{name} failed in {count / self.num_calls(name):.0%} of its {self.num_calls(name):,} calls, which earned "
            f"{'nothing' if name in self.num_dropped else 'its default instead'}; the first failed with {self.first[name]}"
            for name, count in self.num_failed.items()
            if count >= MANY * self.num_calls(name)
        ]
        if self.num_unrewarded and self.num_unrewarded >= MANY * self.num_samples:
            why = [
                f"rewards.{name} {what} for {count / self.num_samples:.0%} of them"
                for what, counts in {"returned None": self.num_absent, "failed": self.num_dropped}.items()
                for name, count in counts.items()
            ]
            found.append(
                f"rewards: none applied to {self.num_unrewarded / self.num_samples:.0%} of {self.num_samples:,} answers, which were left out "
                f"of the update; {', '.join(why)}"
            )
        return found

    def check(self, rewards: Sequence[Reward], where: str) -> None:
        """Raise RewardError with the first failure if all calls of a reward in `where`, such as a step, failed."""
        for reward in rewards:
            if (count := self.num_failed.get(reward.name)) and count == self.num_calls(reward.name):
                raise RewardError(
                    f"{reward.setting}: all {count:,} calls of {where} failed, the first with {self.first[reward.name]}"
                )
