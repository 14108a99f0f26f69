"""Ready-made rewards. Their parameters are columns of the data set, or a reward's fixed `arguments`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rhymerl.rewards.arguments import argument_error, check_argument, is_number
from rhymerl.rewards.hooks import brings

if TYPE_CHECKING:
    from rhymerl.rewards.base import Reward

# Thousands are grouped by commas or not at all; a minus directly after a digit, letter or bracket subtracts.
_NUMBER = re.compile(r"(?<![\w.)\]])[-\u2212]?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?")


@brings(extract=str.strip)
def exact_match(completion: str, *, answer: object) -> float:
    """Return 1.0 when the completion is the answer, white space around both aside; else 0.0."""
    return float(completion.strip() == str(answer).strip())


def last_number(text: str) -> float | None:
    """Return the last number written in `text`: `-1,234.5`, `3e-2`, `.5` (a fraction is two numbers); else None."""
    numbers = _NUMBER.findall(text)
    return _as_number(numbers[-1]) if numbers else None


def boxed_answer(text: str) -> str | None:
    r"""Return what stands in the last `\boxed{…}`, braces within included; None when there is none that ends."""
    start = text.rfind(r"\boxed{")
    depth = 0
    for index in range(start + len(r"\boxed"), len(text)) if start >= 0 else ():
        depth += (text[index] == "{") - (text[index] == "}")
        if depth == 0:
            return text[start + len(r"\boxed{") : index].strip()
    return None


def check_tolerance(reward: Reward) -> None:
    """Raises ConfigError for one that nothing can be within."""
    _check_not_negative(reward, "tolerance")


@brings(check=check_tolerance, extract=last_number)
def numeric_match(completion: str, *, answer: object, tolerance: float = 0.0) -> float:
    """Return 1.0 when the completion's `last_number` is within `tolerance` (absolute) of the answer; else 0.0.

    Raises ValueError when the answer is not a number.
    """
    number = last_number(completion)
    return float(number is not None and abs(number - _as_number(str(answer))) <= tolerance)


def check_pattern(reward: Reward) -> None:
    """Raises ConfigError for what is no regular expression."""
    expected = "a regular expression"
    check_argument(reward, "pattern", lambda value: isinstance(value, str), expected)
    try:
        re.compile(reward.arguments.get("pattern", ""), flags=re.DOTALL)
    except (re.error, OverflowError, RecursionError) as error:
        raise argument_error(reward, "pattern", f"{expected}: {error}") from error


@brings(check=check_pattern)
def format_match(completion: str, *, pattern: str) -> float:
    """Return 1.0 when the regular expression `pattern` matches it all (`.` is any character); else 0.0."""
    return float(re.fullmatch(pattern, completion, flags=re.DOTALL) is not None)


def check_tags(reward: Reward) -> None:
    """Raises ConfigError for those that no text can have; a text's letters would be tags, too."""
    check_argument(reward, "tags", _are_tags, "a list of different tags, such as [think, answer]")


@brings(check=check_tags)
def tag_match(completion: str, *, tags: Sequence[str]) -> float:
    """Return 1.0 when the completion is these tags, each once and in this order, with text in each and none outside; else 0.0.

    `tags=["think", "answer"]` wants `<think>…</think> <answer>…</answer>`; white space between them is free.
    """
    marks = [mark for tag in tags for mark in (f"<{tag}>", f"</{tag}>")]
    if any(completion.count(mark) != 1 for mark in marks):
        return 0.0
    pieces = []
    for mark in marks:
        piece, _, completion = completion.partition(mark)
        pieces.append(piece)
    within, outside = pieces[1::2], [*pieces[::2], completion]
    return float(all(text.strip() for text in within) and not any(text.strip() for text in outside))


def check_lengths(reward: Reward) -> None:
    """Raises ConfigError for an empty range."""
    for name in ("free_characters", "max_characters"):
        _check_not_negative(reward, name)
    given = reward.arguments
    if {"free_characters", "max_characters"} <= {*given} and given["free_characters"] >= given["max_characters"]:
        raise argument_error(reward, "free_characters", f"less than max_characters={given['max_characters']}")


@brings(check=check_lengths)
def length_penalty(completion: str, *, free_characters: int, max_characters: int) -> float:
    """Return 0.0 up to `free_characters`, then linearly down to -1.0 at `max_characters` and beyond.

    The shape of DAPO's soft overlong punishment (arXiv 2503.14476, section 3.4), in characters.
    """
    if not 0 <= free_characters < max_characters:
        raise ValueError(f"free_characters={free_characters}: expected less than max_characters={max_characters}")
    excess = (len(completion) - free_characters) / (max_characters - free_characters)
    return -min(max(excess, 0.0), 1.0)


def _as_number(text: str) -> float:
    return float(text.replace(",", "").replace("\u2212", "-"))


def _check_not_negative(reward: Reward, name: str) -> None:
    check_argument(reward, name, lambda value: is_number(value) and value >= 0, "a number, at least 0")


def _are_tags(value: object) -> bool:
    if not isinstance(value, Sequence) or isinstance(value, str):
        return False
    return len(value) > 0 and all(isinstance(tag, str) and tag for tag in value) and len({*value}) == len(value)
