"""The speed-up of rollouts by drafts: the same requests answered with and without them, in turn, by the same weights."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from math import exp, log, sqrt
from statistics import mean, median, stdev

import numpy as np
import torch

from rhymerl.backends.embedded import EmbeddedBackend
from rhymerl.budgets.base import Budget
from rhymerl.budgets.fixed import FixedBudget
from rhymerl.drafters.base import Drafter
from rhymerl.drafters.none import NoDrafter
from rhymerl.errors import RunError
from rhymerl.history import HistoryStore
from rhymerl.models.policy import Policy
from rhymerl.rollout import RolloutSettings, requests_of
from rhymerl.types import Completion, Prompt, RolloutRequest

_PAIRS = 3
_STUDENT_T = 4.303  # of the 95 % interval of a mean of three
_ABOUT_S = 10.0  # of all pairs together
_PLAIN_TO_DRAFTED = 1.5  # how much longer rollouts without drafts are held to take, to stay within that


@dataclass(frozen=True, slots=True, kw_only=True)
class Speedup:
    """The result of the pairs."""

    ratio: float  # median of the seconds without drafts over those with
    low: float  # of its 95 % interval
    high: float
    equal: float  # share of the answers that are the same; 1 in float64

    @classmethod
    def of(cls, ratios: Sequence[float], *, equal: float) -> Speedup:
        """Build it from the ratios of three pairs: Student's interval, which is wide where they differ.

        Their logarithms are taken for normal.
        """
        assert len(ratios) == _PAIRS
        logs = [log(each) for each in ratios]
        half = _STUDENT_T * stdev(logs) / sqrt(_PAIRS)
        return cls(ratio=median(ratios), low=exp(mean(logs) - half), high=exp(mean(logs) + half), equal=equal)

    def __str__(self) -> str:
        """Return two lines, which claim nothing that the pairs do not show."""
        interval = f"95 % interval {self.low:.2f} to {self.high:.2f}"
        told = f"Drafts make rollouts {self.ratio:.2f} times as fast ({interval})"
        if self.low <= 1 <= self.high:
            told = f"Too short to tell what drafts are worth: {interval} times"
        return f"{told}\n{self.equal:.1%} of answers are the same with and without drafts"


class _Side:
    """One engine of the two."""

    def __init__(self, backend: EmbeddedBackend, history: HistoryStore) -> None:
        self.backend = backend
        self.history = history
        self.backend.follow(history)

    def run(self, requests: Sequence[RolloutRequest]) -> tuple[float, list[Completion]]:
        """Return the seconds, and the answers in the order of the requests."""
        started = time.perf_counter()
        self.backend.submit(requests)
        done: dict[str, Completion] = {}
        while len(done) < len(requests):
            done.update((each.request.id, each) for each in self.backend.collect())
        seconds = time.perf_counter() - started
        self.backend.follow(self.history)  # nothing new: the drafter forgets these answers
        return seconds, [done[request.id] for request in requests]


def measure_speedup(
    policy: Policy,
    prompts: Sequence[Prompt],
    settings: RolloutSettings,
    *,
    drafter: Drafter,
    budget: Budget,
    history: HistoryStore,
    like: EmbeddedBackend,
    seed: int,
    step_s: float,
    autocast: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> Speedup:
    """Answer prompts in `_PAIRS` pairs, which one first taking turns, after one that warms up and is not counted.

    `drafter` and `budget` follow `history` without adding to it; both engines have the settings of `like`. A
    rollout of all `prompts` takes about `step_s` with drafts: no more of them are answered than `_ABOUT_S` seconds allow.
    Raises RunError when drafts change an answer in float64.
    """
    with ExitStack() as stack:
        sides = []
        for each, its_budget in ((NoDrafter(), FixedBudget(0)), (drafter, budget)):
            backend = stack.enter_context(_like(like))
            backend.start(policy, each, budget=its_budget, autocast=autocast)
            sides.append(_Side(backend, history))
        chosen = prompts[: num_affordable(len(prompts), step_s)]
        pairs = [
            _pair(
                sides,
                requests_of(chosen, f"speedup {number}", settings, seed=seed, stop_token_ids=policy.stop_token_ids),
                is_reversed=number % 2 == 1,
            )
            for number in range(1 + _PAIRS)
        ]
    ratios = [seconds for seconds, _ in pairs[1:]]
    equal = float(np.mean([share for _, share in pairs]))
    if equal < 1 and policy.model.dtype == torch.float64:
        raise RunError(
            f"{type(drafter).__name__}: {1 - equal:.2%} of the answers are others than without drafts, in float64; "
            "drafts must never change a token: please report this"
        )
    return Speedup.of(ratios, equal=equal)


def num_affordable(num_prompts: int, step_s: float) -> int:
    """Return how many prompts all pairs have time for, at least one, where a rollout of `num_prompts` takes `step_s` with drafts."""
    expected_s = (1 + _PAIRS) * (1 + _PLAIN_TO_DRAFTED) * step_s
    return max(1, min(num_prompts, int(num_prompts * _ABOUT_S / max(expected_s, 1e-9))))


def _pair(sides: Sequence[_Side], requests: Sequence[RolloutRequest], *, is_reversed: bool) -> tuple[float, float]:
    """Return the seconds without drafts over seconds with, and the share of equal answers; `sides` are without and with."""
    results = {id(side): side.run(requests) for side in (reversed(sides) if is_reversed else sides)}
    (plain_s, plain), (drafted_s, drafted) = (results[id(side)] for side in sides)
    same = [np.array_equal(one.token_ids, two.token_ids) for one, two in zip(plain, drafted, strict=True)]
    return plain_s / drafted_s, float(np.mean(same))


def _like(backend: EmbeddedBackend) -> EmbeddedBackend:
    """A backend of our own class: what one derived from it does besides is no part of the measurement."""
    like = EmbeddedBackend(
        max_running=backend.max_running,
        kv_tokens=backend.kv_tokens,
        max_pass_tokens=backend.max_pass_tokens,
        check_drafts=backend.check_drafts,
    )
    like.complaints = backend.complaints
    return like
