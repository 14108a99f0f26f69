"""The paired measurement of what drafts are worth: the same answers on both sides, an unchanged history, a bounded time."""

from __future__ import annotations

import time

import pytest

from rhymerl.backends.embedded import EmbeddedBackend
from rhymerl.budgets import FixedBudget
from rhymerl.drafters import Drafter, HistoryTreeDrafter
from rhymerl.errors import RunError
from rhymerl.history import HistoryStore
from rhymerl.models.policy import Policy
from rhymerl.rewards import RewardScorer
from rhymerl.rollout import RolloutLoop, RolloutSettings
from rhymerl.runs.speedup import Speedup, measure_speedup, num_affordable
from rhymerl.schedulers import FIFOScheduler
from rhymerl.testing import make_prompt, tiny_policy

PROMPTS = [make_prompt([3 + number, 4, 5], id=str(number)) for number in range(6)]
SETTINGS = RolloutSettings(group_size=3, max_tokens=24, temperature=0.4)


def history_of(policy: Policy) -> HistoryStore:
    """Two epochs of the policy's own answers."""
    history, drafter = HistoryStore(), HistoryTreeDrafter(deterministic=True)
    with EmbeddedBackend(max_running=8) as backend, RewardScorer([]) as scorer:
        backend.start(policy, drafter, budget=FixedBudget(8))
        loop = RolloutLoop(backend, FIFOScheduler(), scorer=scorer, decode=str, history=history, stop_token_ids=(1,))
        for epoch in range(2):
            loop.run(PROMPTS, epoch, SETTINGS, epoch=epoch)
    return history


def measured(policy: Policy, history: HistoryStore, drafter: Drafter | None = None, *, step_s: float = 0.01):
    return measure_speedup(
        policy,
        PROMPTS,
        SETTINGS,
        drafter=drafter or HistoryTreeDrafter(deterministic=True),
        budget=FixedBudget(8),
        history=history,
        like=EmbeddedBackend(max_running=8),
        seed=0,
        step_s=step_s,
    )


class Counting(HistoryTreeDrafter):
    """Remembers which answers it saw, and how often it was drafted from the history."""

    def __init__(self) -> None:
        super().__init__(deterministic=True)
        self.seen: list[tuple[str, int]] = []
        self.from_history = 0
        self.kept: list[int] = []  # prompts with running or finished answers, whenever the history has been followed

    def follow(self, delta) -> None:
        super().follow(delta)
        self.kept.append(len(self._groups))

    def start(self, request) -> None:
        self.seen.append((request.id, request.seed))
        super().start(request)

    def propose_batch(self, requests, contexts, budgets):
        drafts = super().propose_batch(requests, contexts, budgets)
        self.from_history += int((drafts.sources >= 3).sum())
        return drafts


def test_both_sides_answer_alike_and_the_history_stays() -> None:
    policy = tiny_policy()
    history = history_of(policy)
    before = history.state_dict()
    drafter = Counting()
    result = measured(policy, history, drafter)
    assert result.equal == 1.0
    assert result.ratio > 0
    assert history.state_dict() == before
    assert (
        len(drafter.seen) == len(set(drafter.seen)) == len({seed for _, seed in drafter.seen}) == 4 * len(PROMPTS) * 3
    )
    assert drafter.from_history > 0
    assert drafter.kept == [0] * 5


class Slow(HistoryTreeDrafter):
    """Takes its time, so that drafts cannot pay."""

    def __init__(self) -> None:
        super().__init__(deterministic=True)

    def propose_batch(self, requests, contexts, budgets):
        time.sleep(0.02)
        return super().propose_batch(requests, contexts, budgets)


def test_which_side_is_the_faster() -> None:
    policy = tiny_policy()
    assert measured(policy, HistoryStore(), Slow()).ratio < 0.9


class Meddler(HistoryTreeDrafter):
    """Breaks what no drafter should be able to: it changes the weights."""

    def __init__(self, policy: Policy) -> None:
        super().__init__(deterministic=True)
        self.policy = policy

    def start(self, request) -> None:
        self.policy.model.lm_head.weight.data.mul_(-1.0)
        super().start(request)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_other_answers_are_an_error_in_float64_and_a_share_elsewhere(dtype) -> None:
    policy = tiny_policy(dtype=dtype)
    if dtype == "float32":
        assert measured(policy, HistoryStore(), Meddler(policy)).equal < 1
    else:
        with pytest.raises(RunError, match=r"Meddler: \d+\.\d+% of the answers are others than without drafts"):
            measured(policy, HistoryStore(), Meddler(policy))


@pytest.mark.parametrize(
    ("num_prompts", "step_s", "expected"),
    [(64, 0.5, 64), (64, 2.0, 32), (64, 1000.0, 1), (1, 1000.0, 1), (64, 0.0, 64)],
)
def test_long_rollouts_are_measured_on_fewer_prompts(num_prompts, step_s, expected) -> None:
    assert num_affordable(num_prompts, step_s) == expected


@pytest.mark.parametrize(
    ("ratios", "low", "high", "words"),
    [
        # ln: 0.6931, 0.7419, 0.6419; mean 0.6923, deviation 0.0500, half of the interval 4.303 * 0.0500 / sqrt(3) = 0.1242
        (
            [2.0, 2.1, 1.9],
            1.765,
            2.262,
            "Drafts make rollouts 2.00 times as fast (95 % interval 1.76 to 2.26)\n99.0% of answers",
        ),
        (
            [0.5, 0.5, 0.5],
            0.5,
            0.5,
            "Drafts make rollouts 0.50 times as fast (95 % interval 0.50 to 0.50)\n99.0% of answers",
        ),
        # ln: -0.0943, -0.3567, 0.1823; mean -0.0896, deviation 0.2695, half of it 0.6696
        (
            [0.91, 0.7, 1.2],
            0.468,
            1.786,
            "Too short to tell what drafts are worth: 95 % interval 0.47 to 1.79 times\n99.0% of",
        ),
    ],
)
def test_what_is_said_is_what_the_pairs_show(ratios, low, high, words) -> None:
    speedup = Speedup.of(ratios, equal=0.99)
    assert speedup.ratio == sorted(ratios)[1]
    assert (speedup.low, speedup.high) == pytest.approx((low, high), abs=1e-3)
    assert str(speedup).startswith(words)
