"""The records of the history, and the changes that its followers are told. L = response tokens, P = prompt tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from rhymerl.types import IntArray, Split

AnswerEnd = Literal["stop", "length"]  # a withdrawn answer is no answer yet

SPLITS: tuple[Split, ...] = get_args(Split)
ANSWER_ENDS: tuple[AnswerEnd, ...] = get_args(AnswerEnd)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Answer:
    """One past answer. Equal when all fields are, NaN being equal to itself."""

    token_ids: IntArray  # [L] read-only once it is in a store
    reward: float
    advantage: float
    finish_reason: AnswerEnd
    policy_version: int  # of the weights that sampled its last token
    epoch: int  # pass over the data, from 0
    sample: int  # which of its group's answers, from 0

    def __len__(self) -> int:
        return len(self.token_ids)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Answer):
            return NotImplemented
        return _fields(self) == _fields(other) and np.array_equal(self.token_ids, other.token_ids)


def _fields(answer: Answer) -> tuple[object, ...]:
    scores = float(answer.reward).hex(), float(answer.advantage).hex()  # as text, so that NaN equals NaN
    return answer.epoch, answer.sample, answer.policy_version, answer.finish_reason, *scores


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptChange:
    """The change of one prompt. Apply it from top to bottom: forget, drop, add."""

    split: Split
    key: str  # Prompt.key
    is_forgotten: bool  # drop whatever is known under (split, key); there may be nothing
    first_epoch: int  # drop answers of earlier epochs
    prompt_token_ids: IntArray  # [P]; empty when nothing is added
    added: tuple[Answer, ...]  # oldest epoch first, then by sample


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryDelta:
    """The way from one version of a store to `version`; no two changes are about the same prompt.

    Forgotten prompts come first, then the others in the order of their last change.
    """

    version: int  # pass this to `deltas` next time
    is_snapshot: bool  # forget everything before applying the changes
    changes: tuple[PromptChange, ...]

    def __iter__(self) -> Iterator[PromptChange]:
        return iter(self.changes)

    def parts(self, most_tokens: int) -> Iterator[HistoryDelta]:
        """Yield the change in parts, to be applied in order, of at most so many tokens or of one prompt."""
        is_snapshot, changes, size = self.is_snapshot, list[PromptChange](), 0
        for change in self.changes:
            tokens = len(change.prompt_token_ids) + sum(map(len, change.added))
            if changes and size + tokens > most_tokens:
                yield HistoryDelta(version=self.version, is_snapshot=is_snapshot, changes=tuple(changes))
                is_snapshot, changes, size = False, [], 0
            changes.append(change)
            size += tokens
        yield HistoryDelta(version=self.version, is_snapshot=is_snapshot, changes=tuple(changes))
