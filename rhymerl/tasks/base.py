"""The interface of tasks: endless, seeded sources of problems with an exact reward."""

from __future__ import annotations

import hashlib
import json
import random
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from rhymerl.errors import ConfigError, at_least, check_ranges

Row = dict[str, Any]
TaskSplit = Literal["train", "validation", "warmstart"]
Problem = str | list[dict[str, str]]  # text, or chat messages

_TENTHS: tuple[TaskSplit, ...] = ("validation", "train", "train") + ("warmstart",) * 7


def split_of(prompt: Problem, tenths: Sequence[TaskSplit] = _TENTHS) -> TaskSplit:
    """Return the only split in which a problem with this text may appear, for all seeds and sizes."""
    digest = hashlib.blake2b(_text(prompt).encode(), digest_size=8).digest()
    return tenths[int.from_bytes(digest, "little") % len(tenths)]


@dataclass(kw_only=True, eq=False)
class Task(ABC):
    """A procedural task. Subclasses write `problem`; `demonstration` only if they can be warm-started."""

    #: Dotted name of the reward function that scores this task's answers; None = the user names one.
    reward: ClassVar[str | None] = None
    #: As of environments, where it replies: whether the same transcript always gets the same reply, which is then
    #: remembered.
    is_pure: ClassVar[bool] = False
    has_sessions: ClassVar[bool] = False
    #: The splits' shares of all problems.
    tenths: ClassVar[tuple[TaskSplit, ...]] = _TENTHS
    #: Draws in a row that bring nothing new, before there are no more problems.
    patience: ClassVar[int] = 100_000

    seed: int = 0
    train_size: int = at_least(1, 512)
    validation_size: int = at_least(1, 512)

    def __post_init__(self) -> None:
        check_ranges(self)

    @abstractmethod
    def problem(self, random_source: random.Random) -> Row:
        """Draw one problem: `prompt` (text or chat messages) and the columns that the reward needs."""

    def reply(self, row: Row, turns: Sequence[Any]) -> Any:
        """Return what follows a turn of the policy, as an `Environment` does; by default the episode is over."""
        return None

    def demonstration(self, row: Row, random_source: random.Random) -> Problem:
        """Return an answer for the warm start, as chat messages if of several turns. Raises TypeError if none."""
        raise TypeError(f"{type(self).__name__} has no demonstrations, so it cannot warm-start a policy")

    def rows(self, split: TaskSplit) -> list[Row]:
        """Return the fixed pool of one split: `train_size` or `validation_size` distinct problems.

        Raises ConfigError when the task has fewer.
        """
        name = "train_size" if split == "train" else "validation_size"
        size = getattr(self, name)
        pool: dict[str, Row] = {}
        repeats = 0
        for row in self.stream(split, seed=self.seed):
            text = _text(row["prompt"])
            repeats = repeats + 1 if text in pool else 0
            pool.setdefault(text, row)
            if len(pool) == size:
                break
            if repeats == self.patience:
                raise ConfigError(f"task.{name}={size}: {self._too_few(len(pool))}")
        return list(pool.values())

    def _too_few(self, count: int) -> str:
        return f"{type(self).__name__} has only {count} problems for it"

    def stream(self, split: TaskSplit, *, seed: int) -> Iterator[Row]:
        """Yield problems of one split without end (repeats are possible), from `seed` alone.

        Raises ValueError when `patience` draws in a row give nothing for the split.
        """
        random_source = random.Random(f"{type(self).__name__}/{split}/{seed}")
        misses = 0
        while misses < self.patience:
            row = self.problem(random_source)
            misses += 1
            if split_of(row["prompt"], self.tenths) == split:
                misses = 0
                yield row
        raise ValueError(f"{type(self).__name__} has no problems for the split {split!r}")


def _text(prompt: Problem) -> str:
    return prompt if isinstance(prompt, str) else json.dumps(prompt)
