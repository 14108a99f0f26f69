"""HistoPipe of RhymeRL (arXiv 2508.18588): like lengths together, in an order that two steps in a row make up for."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from rhymerl.costs import Points
from rhymerl.schedulers.base import Move, Progress
from rhymerl.schedulers.migration import outliers_to_running
from rhymerl.schedulers.predicting import Piece, PredictingScheduler, queue_of
from rhymerl.schedulers.queue_cost import QueueCost
from rhymerl.types import RolloutRequest

_PLANS = 3  # two steps may be under way, and an evaluation
_GROWTH = 0.75  # the quantile of growth that beta is


class HistoPipeScheduler(PredictingScheduler):
    """Prompts sorted by predicted length and cut into groups; odd steps deal them in ascending order, even ones in descending.

    Tier 1: a group a worker. Tier 2: `groups_per_worker` times as many groups as workers; a long group gets up to
    `max_workers` workers, so that the times of groups rise linearly with the smallest slope that the workers allow. It falls
    back to tier 1 when there are more groups than workers. In the first epoch nothing is known, and prompts go round robin.

    With `migrate`, requests among the last `alpha` of a worker's that have outgrown their group go to a longer group that is still
    running. A request has outgrown its group when it is longer than `beta` times the longest answer predicted there, or than the
    third quartile of growth if that is more.
    """

    def __init__(
        self,
        *,
        tier: Literal[1, 2] = 2,
        groups_per_worker: float = 0.5,
        max_workers: int = 8,
        migrate: bool = True,
        alpha: float = 0.1,
        beta: float = 1.1,
        keep_groups: bool = True,
        costs: str | Points | None = None,
        momentum: float = 0.5,
        tail: float = 0.95,
    ) -> None:
        super().__init__(keep_groups=keep_groups, costs=costs, momentum=momentum, tail=tail)
        if tier not in (1, 2):
            raise ValueError(f"tier={tier}: expected 1 or 2")
        if not 0 < groups_per_worker <= 1:
            raise ValueError(f"groups_per_worker={groups_per_worker}: expected above 0 and at most 1")
        if max_workers < 1:
            raise ValueError(f"max_workers={max_workers}: expected at least 1")
        if not 0 <= alpha <= 1:
            raise ValueError(f"alpha={alpha}: expected 0 to 1")
        if not 1 <= beta < math.inf:
            raise ValueError(f"beta={beta}: expected at least 1, and finite")
        self.tier = tier
        self.groups_per_worker = groups_per_worker
        self.max_workers = max_workers
        self.migrate = migrate
        self.alpha = alpha
        self.beta = beta
        self._beta = beta
        self._longest: dict[int, list[float]] = {}  # by step: the longest answer predicted for each worker's group

    def plan(self, requests: Sequence[RolloutRequest], num_workers: int, step: int) -> list[list[RolloutRequest]]:
        pieces = self.pieces(requests, num_workers)
        if not any(piece.is_known for piece in pieces):
            return [queue_of(pieces[worker::num_workers]) for worker in range(num_workers)]
        pieces.sort(key=lambda piece: (piece.median, piece.tail))
        groups = self._groups(pieces, num_workers)
        counts = self._workers(groups, num_workers)
        shares = [share for group, count in zip(groups, counts, strict=True) for share in cut(group, count)]
        longest = [_longest(group) for group, count in zip(groups, counts, strict=True) for _ in range(count)]
        if step % 2 == 0:
            shares.reverse()
            longest.reverse()
        self._remember(step, longest)
        self._beta = max(self.beta, self.lengths.growth(_GROWTH))
        return [queue_of(share) for share in shares]

    def _remember(self, step: int, longest: list[float]) -> None:
        self._longest.pop(step, None)
        self._longest[step] = longest
        while len(self._longest) > _PLANS:
            del self._longest[next(iter(self._longest))]

    def rebalance(self, progress: Progress) -> list[Move]:
        longest = self._longest.get(progress.step)
        if not self.migrate or longest is None or len(longest) != len(progress.planned):
            return []
        return outliers_to_running(progress, np.array(longest), alpha=self.alpha, beta=self._beta)

    def state_dict(self) -> dict[str, Any]:
        """Return the state, with what `rebalance` needs of steps that are planned already."""
        return {**super().state_dict(), "longest": dict(self._longest), "beta": self._beta}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._longest, self._beta = dict(state["longest"]), state["beta"]

    @property
    def migrates(self) -> bool:
        return self.migrate

    def _groups(self, pieces: Sequence[Piece], num_workers: int) -> list[Sequence[Piece]]:
        count = num_workers if self.tier == 1 else max(round(self.groups_per_worker * num_workers), 1)
        return cut(pieces, min(count, num_workers))

    def _workers(self, groups: Sequence[Sequence[Piece]], num_workers: int) -> list[int]:
        if self.tier == 1 or len(groups) == num_workers:
            return [1] * len(groups)
        return linear_workers(groups, num_workers, self.max_workers, self.cost)


def cut(pieces: Sequence[Piece], count: int) -> list[Sequence[Piece]]:
    """`count` runs of neighbours whose numbers differ by at most one; empty ones where there are too few."""
    size, larger = divmod(len(pieces), count)
    bounds = [number * size + min(number, larger) for number in range(count + 1)]
    return [pieces[start:end] for start, end in pairwise(bounds)]


def linear_workers(groups: Sequence[Sequence[Piece]], num_workers: int, max_workers: int, cost: QueueCost) -> list[int]:
    """Return how many workers each group gets, in ascending order of length; they sum to `num_workers`, which is at least the groups.

    k_n is the smallest k up to `max_workers` for which tau(n, k) <= t0 + n d, with tau the time of group n on k workers
    and t0 = tau(0, max_workers). d is the smallest slope, found by bisection, for which the k_n sum to at most the workers there are.
    Workers left over go, one at a time, to the group whose time falls most.
    """
    longest = np.array([_longest(group) for group in groups])
    total = np.array([sum(piece.total for piece in group) for group in groups])
    k = np.arange(1, max_workers + 1)
    tau = cost.times(longest[:, None], total[:, None] / k)  # [groups, k]
    line = np.arange(len(groups))
    low, high = 0.0, float(tau.max())
    for _ in range(60):
        slope = (low + high) / 2
        within = tau <= tau[0, -1] + slope * line[:, None]
        feasible = within.any(1).all() and within.argmax(1).sum() + len(groups) <= num_workers
        low, high = (low, slope) if feasible else (slope, high)
    within = tau <= tau[0, -1] + high * line[:, None]
    counts = np.where(within.any(1), within.argmax(1), 0) + 1
    if counts.sum() > num_workers:  # group 0 alone may ask for too many
        counts[:] = 1
    while counts.sum() < num_workers:
        saved = total / counts - total / (counts + 1)
        counts[int(saved.argmax())] += 1
    return [int(count) for count in counts]


def _longest(group: Sequence[Piece]) -> float:
    return max((piece.tail for piece in group), default=0.0)
