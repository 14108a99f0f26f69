"""A maker of history drafters, without the answers to other prompts unless a test wants them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from rhymerl.drafters import HistoryTreeDrafter
from rhymerl.history import Answer, HistoryStore
from rhymerl.testing import make_prompt
from rhymerl.types import Prompt

PROMPT = make_prompt([1])


class Drafters:
    """Makes drafters that have read a history, and closes them."""

    def __init__(self) -> None:
        self.made: list[HistoryTreeDrafter] = []

    def __call__(
        self, history: Sequence[Answer] = (), *, prompt: Prompt = PROMPT, split: str = "train", **settings: Any
    ) -> HistoryTreeDrafter:
        drafter = HistoryTreeDrafter(**{"deterministic": True, "others": 0.0, **settings})
        self.made.append(drafter)
        store = HistoryStore(window=100)
        store.add(prompt, history, split)
        drafter.follow(store.snapshot())
        return drafter


@pytest.fixture
def drafters() -> Iterator[Drafters]:
    made = Drafters()
    yield made
    for drafter in made.made:
        drafter.close()
