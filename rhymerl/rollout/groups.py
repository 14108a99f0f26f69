"""The groups of a step's samples; those that teach nothing, and others in their place."""

from __future__ import annotations

from collections.abc import Sequence

from rhymerl.history.answers import are_alike
from rhymerl.types import Sample


def by_prompt(samples: Sequence[Sample]) -> dict[str, list[Sample]]:
    """By prompt id, in the order in which prompts first occur."""
    groups: dict[str, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.prompt.id, []).append(sample)
    return groups


def groups_that_teach_nothing(samples: Sequence[Sample]) -> list[str]:
    """The prompt ids of groups whose rewards are all equal, in the order of the samples."""
    groups = by_prompt(samples).items()
    return [prompt_id for prompt_id, group in groups if are_alike([sample.reward for sample in group])]


def replaced(samples: Sequence[Sample], dull: Sequence[str], fresh: Sequence[Sample]) -> list[Sample]:
    """Fresh groups that teach something in the places of the first of the `dull` ones."""
    groups = by_prompt(fresh)
    for prompt_id in groups_that_teach_nothing(fresh):
        del groups[prompt_id]
    instead = dict(zip(dull, groups.values(), strict=False))
    return [sample for prompt_id, group in by_prompt(samples).items() for sample in instead.get(prompt_id, group)]
