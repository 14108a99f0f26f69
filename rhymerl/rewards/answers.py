"""The rows' own answers, tried before a run: one that earns nothing itself can teach nothing."""

from __future__ import annotations

from collections.abc import Collection
from time import monotonic

from rhymerl.errors import DataError
from rhymerl.rewards.base import Reward
from rhymerl.types import Prompt

_MOST_S = 5.0  # of a start; a computer algebra system takes milliseconds an answer


def check_answers(reward: Reward, prompts: Collection[Prompt]) -> list[str]:
    """Return sentences about rows whose answer a ready-made reward compares badly, each with the first such row.

    Raises DataError where there are rows that no completion could match. As many rows are tried as a few seconds allow.
    """
    try_answer = getattr(reward.call, "try_answer", None)
    if try_answer is None or "answer" in reward.arguments:
        return []
    known: dict[str, str] = {}  # what is wrong, by the answer
    refused: list[tuple[Prompt, str]] = []
    found: dict[str, list[Prompt]] = {}
    tried, end = 0, monotonic() + _MOST_S
    for prompt in prompts:
        if tried and monotonic() > end:
            break
        tried += 1
        answer = prompt.columns["answer"]
        try:
            if (shown := repr(answer)) not in known:
                known[shown] = try_answer(answer)
            found.setdefault(known[shown], []).append(prompt)
        except ValueError as error:
            refused.append((prompt, str(error)))
    of = f"of the {'first ' if tried < len(prompts) else ''}{tried:,} rows"
    if refused:
        first, problem = refused[0]
        raise DataError(
            f"{first.location}: {problem}; {len(refused):,} {of} have an answer that {reward.setting} cannot match with anything"
        )
    return [
        f"{reward.setting}: the answers of {len(rows):,} {of} {words}, the first at {rows[0].location}: {rows[0].columns['answer']!r:.80}"
        for words, rows in found.items()
        if words
    ]
