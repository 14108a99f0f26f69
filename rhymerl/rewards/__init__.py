"""Reward functions: plain Python, run in a pool that survives hanging and crashing ones.

Names are imported when first used: a worker process comes through here and must start fast.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rhymerl.rewards.base import Reward, RewardFn, check_columns
    from rhymerl.rewards.build import build_rewards
    from rhymerl.rewards.functions import exact_match, format_match, length_penalty, numeric_match
    from rhymerl.rewards.scorer import RewardScorer

__all__ = [
    "Reward",
    "RewardFn",
    "RewardScorer",
    "build_rewards",
    "check_columns",
    "exact_match",
    "format_match",
    "length_penalty",
    "numeric_match",
]

_HOMES = {
    "Reward": "base",
    "RewardFn": "base",
    "RewardScorer": "scorer",
    "build_rewards": "build",
    "check_columns": "base",
    "exact_match": "functions",
    "format_match": "functions",
    "length_penalty": "functions",
    "numeric_match": "functions",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
