"""What comes of the requests of a step, on one rank and on all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rhymerl.rewards.failures import Failures
from rhymerl.rollout.ahead import Drawn
from rhymerl.rollout.metrics import over_ranks
from rhymerl.types import Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """An answer and its rewards, as it travels to the other ranks; `place` is that of its request in the step's list."""

    place: int
    drawn: Drawn
    text: str
    rewards: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What a rank has done of a step."""

    answered: Sequence[Answered]
    metrics: Mapping[str, float]
    busy_s: float
    rollout_s: float
    failures: Failures = field(default_factory=Failures)  # of the rewards

    @property
    def num_tokens(self) -> int:
        return sum(len(each.drawn.generated) for each in self.answered)


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """What came of some requests."""

    samples: list[Sample]
    shares: Sequence[Share]
    num_moves: int
    scored_s: float

    @property
    def rollout_s(self) -> float:
        return max(share.rollout_s for share in self.shares)


def metrics_of(rounds: Sequence[Round]) -> dict[str, float]:
    """Of all rounds together."""
    shares = [share for each in rounds for share in each.shares]
    rollout_s = sum(each.rollout_s for each in rounds)
    busy_s, num_ranks = sum(share.busy_s for share in shares), len(rounds[0].shares)
    first, *others = (len({sample.prompt.id for sample in each.samples}) for each in rounds)
    return {
        **over_ranks([share.metrics for share in shares], [share.busy_s for share in shares]),
        "timing_s/rollout": rollout_s,
        "timing_s/reward": sum(each.scored_s for each in rounds),  # what was not hidden behind the rollout
        "rollout/tokens_per_s": sum(share.num_tokens for share in shares) / max(rollout_s, 1e-9),
        "rollout/bubble_frac": max(0.0, 1 - busy_s / max(num_ranks * rollout_s, 1e-9)),
        "rollout/replaced_groups": sum(others) / first,
    }
