"""The figures at the end of a run."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rhymerl.callbacks.early_warnings import equal_rewards
from rhymerl.rewards.failures import Failures
from rhymerl.runs.summary import Summary
from rhymerl.testing import make_requests
from rhymerl.types import Completion, Output, Sample


@pytest.mark.parametrize(
    ("rewards", "first", "last"),
    [
        ([], None, None),
        ([0.5], 0.5, 0.5),
        ([1.0, 2.0], 1.0, 2.0),
        ([1.0, 2.0, 3.0], 1.0, 3.0),
        ([1.0, 2.0, 3.0, 4.0], 1.5, 3.5),
        (list(range(10)), 2.0, 7.0),
        (list(range(100)), 2.0, 97.0),
    ],
)
def test_the_first_and_the_last_steps_are_others(rewards: list[float], first: float | None, last: float | None) -> None:
    summary = Summary()
    summary.num_steps, summary.first_rewards, summary.last_rewards = len(rewards), rewards[:5], rewards[-5:]
    assert (summary.result()["reward_first"], summary.result()["reward_last"]) == (first, last)


def test_malformed_drafts_are_a_figure_where_there_are_any() -> None:
    summary = Summary()
    assert "spec_bad_drafts" not in summary.result()
    summary.num_bad_drafts = 3
    assert summary.result()["spec_bad_drafts"] == 3


def failures(**changed: Any) -> Failures:
    return Failures(**{"num_samples": 100, "num_failed": {}, "first": {"bad": "KeyError: 'a' (mine.py:3)"}, **changed})


@pytest.mark.parametrize(
    ("found", "sentences"),
    [
        (failures(), []),
        (failures(num_failed={"bad": 4}), []),
        (
            failures(num_failed={"bad": 96, "good": 1}),
            [
                "rewards.bad failed in 96% of its 100 calls, which earned its default instead; the first failed with "
                "KeyError: 'a' (mine.py:3)"
            ],
        ),
        (
            failures(num_failed={"bad": 5}, num_absent={"bad": 90}, num_unrewarded=4),
            [
                "rewards.bad failed in 50% of its 10 calls, which earned its default instead; the first failed with "
                "KeyError: 'a' (mine.py:3)"
            ],
        ),
        (
            failures(num_absent={"bad": 94}, num_unrewarded=94),
            [
                "rewards: none applied to 94% of 100 answers, which were left out of the update; rewards.bad returned None "
                "for 94% of them"
            ],
        ),
    ],
)
def test_rewards_that_fail_more_often_than_now_and_then_are_named(found: Failures, sentences: list[str]) -> None:
    summary = Summary()
    summary.failures = found
    assert summary.result().get("problems", []) == sentences
    again = Summary()
    again.load_state_dict(summary.state_dict())
    assert again.failures == found


def samples_of(rewards: list[list[float]]) -> list[Sample]:
    """Return a group of answers for each list."""
    requests = make_requests(len(rewards), group_size=len(rewards[0]))
    nothing = Output(token_ids=np.empty(0, np.int32), logprobs=np.empty(0), policy_versions=np.empty(0, np.int32))
    return [
        Sample(
            completion=Completion(request=request, output=nothing),
            text="",
            reward=reward,
            rewards={},
            loss_mask=np.empty(0, np.bool_),
        )
        for request, reward in zip(requests, sum(rewards, []), strict=True)
    ]


@pytest.mark.parametrize(
    ("rewards", "advantage", "words"),
    [
        ([[0.0, 0.0], [0.0, 0.0]], 0.0, "all 4 answers have the same reward (0)"),
        ([[0.5, 0.5], [0.5, 0.5]], -0.3, "all 4 answers have the same reward (0.5)"),
        ([[1.0, 1.0], [0.0, 0.0]], 0.0, "all answers to each prompt have the same reward"),
        ([[1.0, 1.0], [0.0, 0.0]], None, "all answers to each prompt have the same reward"),
        ([[1.0, 1.0], [0.0, 0.0]], 0.7, None),
        ([[1.0, 0.0], [0.0, 0.0]], 0.7, None),
    ],
)
def test_rewards_that_teach_nothing(rewards: list[list[float]], advantage: float | None, words: str | None) -> None:
    """A critic or no baseline at all may learn from groups that are alike, as long as the groups differ."""
    frac = float(np.mean([len(set(group)) == 1 for group in rewards]))
    found = equal_rewards(
        samples_of(rewards), frac_zero_std=frac, advantages=lambda indices: [advantage] * len(indices)
    )
    assert found == words
