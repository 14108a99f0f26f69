"""The entries of a store: each prompt's answers, and the versions since which they are known."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from rhymerl.history.records import ANSWER_ENDS, Answer
from rhymerl.types import IntArray, Split

Name = tuple[Split, str]  # split, Prompt.key
AnswerKey = tuple[int, int]  # epoch, sample

Value = TypeVar("Value")


@dataclass(slots=True, kw_only=True)
class Entry:
    """A prompt and its answers, oldest epoch first, then by sample. Versions are the store's."""

    token_ids: IntArray  # [P]
    answers: dict[AnswerKey, Answer] = field(default_factory=dict)
    added_at: dict[AnswerKey, int] = field(default_factory=dict)  # who is behind this version lacks the answer
    changed_at: int = 0
    used_at: int = 0

    def check_integrity(self, window: int) -> None:
        """Raise AssertionError when the answers are none, out of order, outside the window or open to change."""
        locations = list(self.answers)
        assert locations
        assert locations == sorted(locations) == [(answer.epoch, answer.sample) for answer in self.answers.values()]
        assert locations[-1][0] - locations[0][0] < window
        assert self.added_at.keys() == self.answers.keys()
        assert max(self.added_at.values()) <= self.changed_at <= self.used_at
        for tokens in (self.token_ids, *(answer.token_ids for answer in self.answers.values())):
            assert tokens.dtype == np.int32
            assert not tokens.flags.writeable


class EvictionLog:
    """The newest `size` prompts that readers have to forget; readers behind `start` need a snapshot."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.start = 0
        self._versions: dict[Name, int] = {}  # oldest first

    def add(self, name: Name, version: int) -> None:
        """Readers behind `version` have to forget the prompt."""
        self._versions.pop(name, None)
        self._versions[name] = version
        if len(self._versions) > self.size:
            self.start = self._versions.pop(next(iter(self._versions)))

    def clear(self, version: int) -> None:
        """Readers behind `version` have to start anew."""
        self._versions.clear()
        self.start = version

    def since(self, version: int) -> list[Name]:
        """Return what a reader at `version` has to forget, oldest eviction first."""
        return [name for name, _ in newer(self._versions, version, lambda evicted_at: evicted_at)]

    def check_integrity(self, version: int) -> None:
        """Raise AssertionError when the log is too long, out of order or ahead of the store."""
        versions = list(self._versions.values())
        assert len(versions) <= self.size
        assert versions == sorted(versions)
        assert self.start <= version
        assert all(self.start <= each <= version for each in versions)


def newer(values: dict[Name, Value], version: int, version_of: Callable[[Value], int]) -> list[tuple[Name, Value]]:
    """Return the tail of a mapping in the order of versions that is newer than `version`."""
    tail = []
    for item in reversed(values.items()):
        if version_of(item[1]) <= version:
            break
        tail.append(item)
    return tail[::-1]


def merge_answers(known: Mapping[AnswerKey, Answer], answers: Iterable[Answer]) -> dict[AnswerKey, Answer]:
    """Return one answer per (epoch, sample), in order: the newer policy's, else the first one."""
    chosen = dict(known)
    for answer in answers:
        location = answer.epoch, answer.sample
        if location not in chosen or chosen[location].policy_version < answer.policy_version:
            chosen[location] = answer
    return dict(sorted(chosen.items()))


def fitting(answers: dict[AnswerKey, Answer], *, window: int, max_tokens: int | None) -> dict[AnswerKey, Answer]:
    """Return the newest `window` epochs, fewer where they have more than `max_tokens`; `answers` is in order."""
    if not answers:
        return {}
    newest, _ = next(reversed(answers))
    first, num_tokens = newest - window + 1, 0
    for (epoch, _), answer in reversed(answers.items()):
        num_tokens += len(answer)
        if max_tokens is not None and num_tokens > max_tokens:
            first = max(first, epoch + 1)
            break
    return {location: answer for location, answer in answers.items() if location[0] >= first}


def check_answer(answer: Answer) -> None:
    """Raise ValueError naming the field that is wrong."""
    tokens = np.asarray(answer.token_ids)
    if tokens.ndim != 1 or (
        tokens.size and (tokens.dtype.kind not in "iu" or not 0 <= tokens.min() <= tokens.max() < 2**31)
    ):
        raise ValueError("token_ids: expected a vector of integers from 0 to 2**31 - 1")
    for name in ("epoch", "sample"):
        if getattr(answer, name) < 0:
            raise ValueError(f"{name}={getattr(answer, name)}: expected 0 or more")
    if answer.finish_reason not in ANSWER_ENDS:
        raise ValueError(f"finish_reason={answer.finish_reason!r}: expected one of {', '.join(ANSWER_ENDS)}")
