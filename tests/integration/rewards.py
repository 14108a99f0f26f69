"""Reward functions by name."""

from __future__ import annotations


def digits(completion: str) -> float:
    """The share of digits: something that a random policy has at once, and can learn."""
    return sum(character.isdigit() for character in completion) / max(1, len(completion))
