"""The results of a step's requests: outputs with rewards, on one rank and on all, and the groups that they form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rhymerl.backends.spans import WorkerSpan
from rhymerl.history.answers import are_alike
from rhymerl.rewards.failures import Failures
from rhymerl.types import Output, Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredOutput:
    """An answer and its rewards, as sent to the other ranks; `index` is its request's in the step's list."""

    index: int
    output: Output
    text: str
    rewards: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankResult:
    """The results of one rank for a step."""

    scored: Sequence[ScoredOutput]
    metrics: Mapping[str, float]
    busy_s: float
    rollout_s: float
    sampled_s: float | None = None  # as of Workers
    failures: Failures = field(default_factory=Failures)  # of the rewards
    spans: Sequence[WorkerSpan] = ()  # since its former result

    @property
    def num_tokens(self) -> int:
        return sum(each.output.num_sampled for each in self.scored)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRound:
    """The results of some of the step's requests on all ranks: its prompts' own, or those of replacements."""

    samples: list[Sample]
    by_rank: Sequence[RankResult]
    num_moves: int
    scored_s: float

    @property
    def rollout_s(self) -> float:
        return max(result.rollout_s for result in self.by_rank)


def by_prompt(samples: Sequence[Sample]) -> dict[str, list[Sample]]:
    """Return the samples by prompt id, in the order in which prompts first occur."""
    groups: dict[str, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.prompt.id, []).append(sample)
    return groups


def groups_that_teach_nothing(samples: Sequence[Sample]) -> list[str]:
    """Return the prompt ids of groups whose rewards are all equal, in the order of the samples."""
    groups = by_prompt(samples).items()
    return [prompt_id for prompt_id, group in groups if are_alike([sample.reward for sample in group])]


def replaced(samples: Sequence[Sample], useless: Sequence[str], fresh: Sequence[Sample]) -> list[Sample]:
    """Replace the first of the `useless` groups by the fresh ones that teach something."""
    groups = by_prompt(fresh)
    for prompt_id in groups_that_teach_nothing(fresh):
        del groups[prompt_id]
    instead = dict(zip(useless, groups.values(), strict=False))
    return [sample for prompt_id, group in by_prompt(samples).items() for sample in instead.get(prompt_id, group)]
