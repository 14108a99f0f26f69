"""The pool: the newest answers to all prompts of a split, from which drafts for any of them can be made."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import TypeVar

from rhymerl.history.records import Answer

POOL_TOKENS = 2**17  # it is full with the answers to a prompt in an epoch that reach this number

Prompt = TypeVar("Prompt")


def pooled(newest_first: Iterable[tuple[Prompt, Sequence[Answer]]]) -> list[tuple[Prompt, list[Answer]]]:
    """Return these prompts' pool: each one's newest epoch, then each one's epoch before, while there is room.

    The answers to a prompt stand with the oldest epoch first. Those of the prompt that was answered last are first in.
    """
    pool: list[tuple[Prompt, list[Answer]]] = []
    room = POOL_TOKENS
    epochs: Iterable[tuple[Prompt, list[list[Answer]]]]
    epochs = ((prompt, _by_epoch(answers)) for prompt, answers in newest_first)
    while room > 0:
        older = []
        for prompt, left in epochs:
            answers = left.pop()
            pool.append((prompt, answers))
            room -= sum(map(len, answers))
            if room <= 0:
                break
            if left:
                older.append((prompt, left))
        if not older:
            break
        epochs = older
    return pool


def _by_epoch(answers: Sequence[Answer]) -> list[list[Answer]]:
    return [list(group) for _, group in groupby(answers, lambda answer: answer.epoch)]
