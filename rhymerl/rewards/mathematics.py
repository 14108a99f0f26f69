"""Mathematical expressions compared by value: one half is 0.5."""

from __future__ import annotations

import importlib
import re
import threading
from typing import TYPE_CHECKING, Any

from rhymerl.errors import ConfigError
from rhymerl.rewards.hooks import brings

if TYPE_CHECKING:
    from rhymerl.rewards.base import Reward

_LIMIT_S = 5  # for one expression; some that are short keep a computer algebra system busy for hours
_DELIMITED = re.compile(r"\$|\\boxed|\\\[|\\\(")


def check_math(reward: Reward) -> None:
    """Raises ConfigError when the package is missing."""
    try:
        importlib.import_module("math_verify")
    except ImportError as error:
        raise ConfigError(f"{reward.setting}: this needs math-verify: pip install 'rhymerl[math]'") from error


def math_answer(text: str) -> str | None:
    """Return the expression that counts as the answer in `text`, in a canonical form; None when there is none."""
    parsed = _parse(text)
    return str(parsed[0]) if parsed else None


@brings(check=check_math, extract=math_answer)
def math_match(completion: str, *, answer: object) -> float:
    r"""Return 1.0 when the last expression of the completion, best in `\boxed{}`, has the value of the answer; else 0.0.

    By math-verify, whose time limits rest on a signal: they hold in a process's main thread, which is where `where="pool"` and
    usually `"main"` call this; elsewhere only the limits of whoever calls. Raises ValueError when the answer is no expression.
    """
    text = str(answer)
    gold = _parse(text if _DELIMITED.search(text) else rf"\boxed{{{text}}}")
    if not gold:
        raise ValueError(f"answer={text!r:.80}: math-verify finds no expression in it")
    return float(importlib.import_module("math_verify").verify(gold, _parse(completion), timeout_seconds=_limit()))


def _parse(text: str) -> list[Any]:
    found: list[Any] = importlib.import_module("math_verify").parse(text, parsing_timeout=_limit())
    return found


def _limit() -> int | None:
    return _LIMIT_S if threading.current_thread() is threading.main_thread() else None
