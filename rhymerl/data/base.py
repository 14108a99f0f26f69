"""The records that travel from a data source to the encoder, and from the loader to the training step."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rhymerl.errors import DataError
from rhymerl.tasks.base import Row
from rhymerl.types import Prompt

PROMPT_COLUMN = "prompt"  # unless data.prompt_column says another
ONLY_SET = "validation"  # the name of an evaluation's data set that has no name of its own


@dataclass(frozen=True, slots=True, kw_only=True)
class LocatedRow:
    """A row and its origin: `LocatedRow(location="data.train='a.jsonl', line 3", row={"prompt": "1+1=?"})`."""

    location: str  # begins every error message about the row
    row: Row


def prompt_in(located: LocatedRow, column: str) -> Any:
    """Return a row's prompt as it stands there. Raises DataError where there is none."""
    where = f"{located.location}: data.prompt_column={column!r}"
    if column not in located.row:
        raise DataError(f"{where}: no such column; it has {', '.join(map(repr, located.row)) or 'none'}")
    prompt = located.row[column]
    prompt = prompt.tolist() if hasattr(prompt, "tolist") else prompt  # numpy's, as a data frame has them
    if prompt is None or prompt != prompt:  # NaN stands for null in a data frame
        raise DataError(f"{where}: the prompt is null; expected a string or a list of chat messages")
    return prompt


def columns_of(prompts: Collection[Prompt]) -> tuple[list[str], dict[str, str]]:
    """Return the columns that all rows have, sorted, and each other column with the first row that lacks it."""
    every = sorted(set[str]().union(*(prompt.columns for prompt in prompts)))
    lacking: dict[str, str] = {}
    for prompt in prompts:
        if len(prompt.columns) < len(every):
            for name in every:
                if name not in prompt.columns:
                    lacking.setdefault(name, prompt.location)
    return [name for name in every if name not in lacking], lacking


class PromptBatch:
    """The prompts of one rollout step, in order: one Lightning batch.

    Not a Sequence on purpose: Lightning takes sequences apart to move or cast what is inside, and a prompt is a frozen
    record of the host.
    """

    __slots__ = ("prompts",)

    def __init__(self, prompts: Sequence[Prompt]) -> None:
        self.prompts = tuple(prompts)

    def __len__(self) -> int:
        return len(self.prompts)

    def __iter__(self) -> Iterator[Prompt]:
        return iter(self.prompts)
