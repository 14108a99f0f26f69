"""Reward functions by name."""

from __future__ import annotations

import random
import time


def digits(completion: str) -> float:
    """The share of digits: something that a random policy has at once, and can learn."""
    return sum(character.isdigit() for character in completion) / max(1, len(completion))


def digits_at_any_time(completion: str) -> float:
    """The same, after a while that nobody knows."""
    time.sleep(random.SystemRandom().uniform(0, 0.01))
    return digits(completion)


def broken(completion: str) -> float:
    """Something that nobody noticed."""
    raise ZeroDivisionError("no marks today")


def tags(completion: str) -> float:
    return float(completion.count("<a>") + completion.count("</a>"))


def for_even_sums(completion: str, *, answer: str) -> float | None:
    """For the problems of one task among two."""
    return digits(completion) if int(answer) % 4 == 0 else None


def broken_for_some(completion: str) -> float:
    """Depends on the answer alone."""
    if len(completion) % 2:
        raise ZeroDivisionError("an odd answer")
    return digits(completion)
