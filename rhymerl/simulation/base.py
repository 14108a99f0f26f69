"""The inputs of a simulation: the work of a step, how fast workers decode, and how steps follow one another."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np

from rhymerl.costs import CostCurve
from rhymerl.types import BoolArray, FloatArray, IndexArray, RolloutRequest

Pipeline = Literal["colocated", "disaggregated"]

REFERENCE_COSTS = CostCurve([(0, 1.0), (128, 2.0)])


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """A step's requests and how long their answers will be: R requests, in canonical order."""

    requests: Sequence[RolloutRequest]
    lengths: IndexArray  # [R] tokens, at least 1
    is_cut: BoolArray  # [R] cut off at the limit
    turns: IndexArray | None = None  # [R] of like length; None where nobody waits for an environment
    waits: FloatArray | None = None  # [R] time of all waits for it: one of like length behind each turn


class LengthSource(ABC):
    """The source of a simulation's lengths."""

    @abstractmethod
    def steps(self, num_steps: int, seed: int) -> list[StepWork]:
        """Return the same for the same arguments; fewer steps where there are no more."""


@dataclass(frozen=True, kw_only=True)  # no slots: it remembers what it has worked out
class Decoding:
    """The speed at which a worker decodes. Its time unit is that of `costs`; tokens may be fractions.

    A pass over running requests verifies `verified` tokens for each and emits `tokens_per_pass` of them. A request is
    redone along its prefetched tokens up to the first that the next policy does not sample again, as `RunAheadDrafter`
    does it. Each is sampled again with probability `redo_acceptance`. A pass verifies as many of them as pay, as
    `GoodputBudget` chooses them, but no more than `redo_nodes`.
    """

    costs: CostCurve = field(default_factory=lambda: REFERENCE_COSTS)
    max_running: int | None = None  # requests side by side; None = the whole queue
    tokens_per_pass: float = 1.0
    verified: float = 1.0
    redo_acceptance: float = 0.999  # of a drafted prefetched token whose predecessors were accepted
    redo_nodes: int = 32
    # The share of a moved request's tokens that are computed again; 0 where workers share keys and values.
    recomputed: float = 1.0

    @cached_property
    def redo_tokens(self) -> FloatArray:
        """Emitted with so many prefetched tokens verified, 1 + a + a^2 + ...; [redo_nodes + 1]."""
        return np.power(self.redo_acceptance, np.arange(self.redo_nodes + 1)).cumsum()

    def redone(self, sampled: FloatArray) -> FloatArray:
        """Return how many prefetched tokens are expected up to the first that is not sampled again, it among them."""
        a = self.redo_acceptance
        return sampled if a == 1 else (1 - np.power(a, sampled)) / (1 - a)

    def nodes_that_pay(self, redone: int, others: int) -> int:
        """Return the prefetched tokens to verify per `redone` request, beside `others`, for the most tokens a time."""
        nodes = np.arange(self.redo_nodes + 1.0)
        tokens = redone * self.redo_tokens + others * self.tokens_per_pass
        cost = self.pass_cost(redone * (1 + nodes) + others * self.verified)
        return int((tokens / cost).argmax())

    def pass_cost(self, load: FloatArray) -> FloatArray:
        return self.costs.seconds(0, load, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """The times of what happened: S steps on W workers. Colocated training is left out: it stops all workers alike."""

    starts: FloatArray  # [S, W] a worker begins its queue
    ends: FloatArray  # [S, W] and has finished it; equal to the start of an empty queue
    ahead: FloatArray  # [S, W] time spent on sampling tokens of the next step that are sampled again
    done: FloatArray  # [S] the last worker has finished
    trained: FloatArray  # [S] the policy that this step's answers have trained is there
    tokens: FloatArray  # [S] response tokens
    stale_tokens: FloatArray  # [S] of these, sampled by the policy before
    staleness: IndexArray  # [S] the oldest policy in a step's answers, in steps
    moves: IndexArray  # [S] requests that went to another worker
    tails: FloatArray  # [S, W] time in which at most a quarter of a worker's requests were left
    waits: Sequence[FloatArray]  # [S][R] from when a step may begin to a request's first token
    latencies: Sequence[FloatArray]  # [S][R] and to its last
