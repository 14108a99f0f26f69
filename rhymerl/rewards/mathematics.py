"""Mathematical expressions compared by value: one half is 0.5."""

from __future__ import annotations

import importlib
import re
import threading
from decimal import Decimal
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from rhymerl.errors import missing_package
from rhymerl.rewards.arguments import answer_text
from rhymerl.rewards.functions import boxed_answer
from rhymerl.rewards.hooks import brings

if TYPE_CHECKING:
    from rhymerl.rewards.base import Reward

_NO_UNITS = "pi|sqrt|sin|cos|tan|cot|csc|log|exp|mod|and|inf[a-z]*|alpha|beta|gamma|delta|theta|lambda|sigma|omega"
_SCALES = "percent|percentage|pct|hundred|thousand|million|billion|trillion|dozen"
_WORD = rf"(?!(?:{_NO_UNITS}|{_SCALES})\b)[A-Za-z]{{3,}}"
_SHORT_UNIT = "cm|mm|km|kg|mg|ft|in|lb|oz|hr|ml|mi|yd|m"
_NUMBER = (
    r"(?:(?P<whole>\d+) (?=\d+/))?(?P<number>\d+/\d+|\\frac\{\d+\}\{\d+\}|\d{1,3}(?: \d{3})+|\d[\d,]*(?:\.\d+)?|\.\d+)"
)
# What people write without LaTeX: `$18`, `18 dollars`, `1 1/2 cups`, `5 cm^2`, `60 km/h`. Two letters may be two
# variables.
_QUANTITY = re.compile(
    rf"(?P<sign>[-+]?) ?\\?[$€£¥]?{_NUMBER}(?P<unit>(?: ?(?:{_SHORT_UNIT})\b| {_WORD})(?:[ /][A-Za-z]+)*(?:\^\{{?\d\}}?|[²³])?)?"
)
_LETTER = re.compile(r"[^\W\d_]")
_WORDS = re.compile(rf"{_WORD}(?:[ -][A-Za-z]+)*|[Nn]o")
_LIMIT_S = 5  # for one expression; some that are short keep a computer algebra system busy for hours
_DELIMITED = re.compile(r"\$|\\boxed|\\\[|\\\(")


def check_math(reward: Reward) -> None:
    """Raises ConfigError when the package is missing."""
    try:
        importlib.import_module("math_verify")
    except ImportError as error:  # also without the version of antlr4 that the extra brings
        raise missing_package("math_verify", reward.setting) from error


def math_answer(text: str) -> str | None:
    """Return the expression that counts as the answer in `text`, in a canonical form; None when there is none."""
    parsed = _parse(text)
    return str(parsed[0]) if parsed else None


def try_math_answer(answer: object) -> str:
    """Return what is wrong with the answer of a row: it is no expression but words, or is not found equal to itself."""
    text = _plain_number(answer)
    gold = _gold(text)
    if not math_match(text if _DELIMITED.search(text) else rf"\boxed{{{text}}}", answer=answer):
        return "earn nothing themselves"
    is_product_of_letters = getattr(gold[0], "free_symbols", None) and re.search(rf"(?<!\\)\b{_WORD}", text)
    return "can be compared as text only" if isinstance(gold[0], str) or is_product_of_letters else ""


@brings(check=check_math, extract=math_answer, try_answer=try_math_answer)
def math_match(completion: str, *, answer: object) -> float:
    r"""Return 1.0 when the completion's last expression, best in `\boxed{}`, equals the answer; else 0.0.

    A percentage equals both its hundredth part and the number itself; units and currencies do not count, and words are
    compared as text. math-verify does it, with time limits by a signal. They hold in a process's main thread, where
    `where="pool"` and usually `"main"` call this; elsewhere only the caller's limits hold. Raises ValueError when the
    answer is no expression.
    """
    gold = _gold(_plain_number(answer))
    return float(importlib.import_module("math_verify").verify(gold, _parse(completion), timeout_seconds=_limit()))


def _plain_number(answer: object) -> str:
    """Return the answer as a text, in which a number has no exponent."""
    text = answer_text(answer)
    return f"{Decimal(text):f}" if isinstance(answer, float) else text


@lru_cache(maxsize=10_000)  # those of a group are equal
def _gold(text: str) -> list[Any]:
    is_delimited = _DELIMITED.search(text) and _as_latex(text) == text
    found = _parse(text if is_delimited else rf"\boxed{{{text}}}")
    if not found:
        raise ValueError(f"answer={text!r:.80}: math-verify finds no expression in it")
    return found


def _parse(text: str) -> list[Any]:
    r"""Return what math-verify reads in `text`, whose last `\boxed{}` may have something else than LaTeX in it."""
    written = boxed_answer(text)
    if written is not None and written != (latex := _as_latex(written)):
        before, opening, behind = text.rpartition(r"\boxed{")
        text = before + opening + behind.replace(written, latex, 1)
    found = _read(text)
    is_number = found and not _LETTER.search(str(found[0]))
    if is_number and all(isinstance(each, str) for each in found):  # no LaTeX either, such as 28% and 30°
        found = _read(found[0].replace("\\", "")) + found
    return found


def _as_latex(text: str) -> str:
    """Return the number of a quantity, words as text, and all else as it is."""
    if _WORDS.fullmatch(text):
        return rf"\text{{{text}}}"
    found = _QUANTITY.fullmatch(text)
    if found is None:
        return text
    whole, number = found["whole"], found["number"].replace(" ", "")
    return f"{found['sign']}{whole}\\frac{{{number.replace('/', '}{')}}}" if whole else f"{found['sign']}{number}"


def _read(text: str) -> list[Any]:
    found: list[Any] = importlib.import_module("math_verify").parse(text, parsing_timeout=_limit())
    return found


def _limit() -> int | None:
    return _LIMIT_S if threading.current_thread() is threading.main_thread() else None
