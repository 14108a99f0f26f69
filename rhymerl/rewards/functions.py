"""Ready-made rewards. Their parameters are columns of the data set, or a reward's fixed `arguments`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rhymerl.rewards.arguments import answer_text, argument_error, check_argument, is_number
from rhymerl.rewards.hooks import brings
from rhymerl.rewards.numbers import are_close, last_number, number_of

if TYPE_CHECKING:
    from rhymerl.rewards.base import Reward


def try_text(answer: object) -> str:
    """Raises ValueError for what is neither text nor a number."""
    answer_text(answer)
    return ""


@brings(extract=str.strip, try_answer=try_text)
def exact_match(completion: str, *, answer: object) -> float:
    """Return 1.0 when the completion is the answer, white space around both aside; else 0.0.

    For the answer 72.0 that is a number, `72` counts, too. Raises ValueError when the answer is neither text nor a
    number.
    """
    text = answer_text(answer).strip()
    return float(completion.strip() in (text, text.removesuffix(".0") if isinstance(answer, float) else text))


def boxed_answer(text: str) -> str | None:
    r"""Return what stands in the last `\boxed{…}`, braces within included; None when there is none that ends."""
    start = text.rfind(r"\boxed{")
    depth = 0
    for index in range(start + len(r"\boxed"), len(text)) if start >= 0 else ():
        depth += (text[index] == "{") - (text[index] == "}")
        if depth == 0:
            return text[start + len(r"\boxed{") : index].strip()
    return None


def try_number(answer: object) -> str:
    """Raises ValueError for what is no number."""
    number_of(answer)
    return ""


@brings(check=lambda reward: _check_not_negative(reward, "tolerance"), extract=last_number, try_answer=try_number)
def numeric_match(completion: str, *, answer: object, tolerance: float = 0.0) -> float:
    """Return 1.0 when the completion's `last_number` is within `tolerance` (absolute) of the answer; else 0.0.

    Without a tolerance they are compared exactly. Raises ValueError when the answer is not a number.
    """
    number, wanted = last_number(completion), number_of(answer)
    return float(number is not None and are_close(number, wanted, tolerance))


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
def tag_match(completion: str, *, tags: Sequence[str], prompt: object = "") -> float:
    """Return 1.0 when the completion is these tags, each once, in order, with text in each and none outside; else 0.0.

    `tags=["think", "answer"]` wants `<think>…</think> <answer>…</answer>`; white space between them is free. A first
    tag with which the prompt ends, as some chat templates write it, counts as the completion's.
    """
    if isinstance(prompt, str) and prompt.rstrip().endswith(f"<{tags[0]}>"):
        completion = f"<{tags[0]}>{completion}"
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


def turn_rewards(completion: str, *, turn_rewards: Sequence[float | None]) -> float:
    """Return the sum of an environment's rewards for turns; PPO gets each at the end of its turn."""
    return sum((reward for reward in turn_rewards if reward is not None), 0.0)


def _check_not_negative(reward: Reward, name: str) -> None:
    check_argument(reward, name, lambda value: is_number(value) and value >= 0, "a number, at least 0")


def _are_tags(value: object) -> bool:
    if not isinstance(value, Sequence) or isinstance(value, str):
        return False
    return len(value) > 0 and all(isinstance(tag, str) and tag for tag in value) and len({*value}) == len(value)
