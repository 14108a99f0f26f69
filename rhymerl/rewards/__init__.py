"""Reward functions: plain Python, run in a pool that survives hanging and crashing ones.

Names are imported when first used: a reward process comes through here and must start fast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rhymerl.lazy import lazy_names

if TYPE_CHECKING:
    from rhymerl.rewards.base import Reward, RewardFn, check_columns, check_reward
    from rhymerl.rewards.build import build_rewards, plain_rewards
    from rhymerl.rewards.classifier import classifier_score
    from rhymerl.rewards.functions import (
        exact_match,
        format_match,
        length_penalty,
        numeric_match,
        tag_match,
        turn_rewards,
    )
    from rhymerl.rewards.mathematics import math_match
    from rhymerl.rewards.programs import code
    from rhymerl.rewards.reasoning_gym import reasoning_gym_reward
    from rhymerl.rewards.scorer import RewardScorer

__all__ = [
    "Reward",
    "RewardFn",
    "RewardScorer",
    "build_rewards",
    "check_columns",
    "check_reward",
    "classifier_score",
    "code",
    "exact_match",
    "format_match",
    "length_penalty",
    "math_match",
    "numeric_match",
    "plain_rewards",
    "reasoning_gym_reward",
    "tag_match",
    "turn_rewards",
]

if not TYPE_CHECKING:  # a type checker would take any name for one of ours
    __getattr__, __dir__ = lazy_names(__name__)
