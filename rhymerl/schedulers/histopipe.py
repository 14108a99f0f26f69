"""HistoPipe of RhymeRL (arXiv 2508.18588): like lengths together, in an order that two steps in a row make up for."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from rhymerl.errors import require
from rhymerl.schedulers.base import Move, Progress
from rhymerl.schedulers.predicting import Piece, PredictingScheduler, queue_of
from rhymerl.types import FloatArray, RolloutRequest

_PLANS = 3  # two steps may be under way, and an evaluation
_GROWTH = 0.75  # the quantile of growth that beta is

Group = tuple[Sequence[Piece], int]  # neighbours, and how many workers they have


@dataclass(kw_only=True, eq=False)
class HistoPipeScheduler(PredictingScheduler):
    """Groups of prompts sorted by predicted length; odd steps assign them in ascending order, even ones in descending.

    Tier 1: a group a worker. Tier 2: `groups_per_worker` times as many groups as workers; a group gets up to
    `max_workers` workers, so that the times of groups rise linearly with the smallest slope that the workers allow. The
    shortest group may take as long as an update, `train_time`, which is in the unit of `costs`. Tier 2 falls back to
    tier 1 where no slope is enough, and where it is predicted to be slower. In the first epoch nothing is known, and
    prompts go round robin.

    With `migrate`, requests among the last `alpha` of a worker's that have outgrown their group go to a longer group
    that is still running. A request has outgrown its group when it is longer than `beta` times the longest answer
    predicted there, or than the third quartile of growth if that is more. The paper moves requests of long groups to
    the next step, and fills up the update from a replay buffer; that is missing here.
    """

    tier: Literal[1, 2] = 2
    groups_per_worker: float = 0.5
    max_workers: int = 8
    migrate: bool = True
    alpha: float = 0.1
    beta: float = 1.1
    train_time: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.tier in (1, 2), "tier", self.tier, "1 or 2")
        share = "above 0 and at most 1"
        require(0 < self.groups_per_worker <= 1, "groups_per_worker", self.groups_per_worker, share)
        require(self.max_workers >= 1, "max_workers", self.max_workers, "at least 1")
        require(0 <= self.alpha <= 1, "alpha", self.alpha, "0 to 1")
        require(1 <= self.beta < math.inf, "beta", self.beta, "at least 1, and finite")
        require(0 <= self.train_time < math.inf, "train_time", self.train_time, "at least 0, and finite")
        self._beta = self.beta
        self._longest: dict[int, list[float]] = {}  # by step: the longest answer predicted for each worker's group

    def plan(self, requests: Sequence[RolloutRequest], num_workers: int, step: int) -> list[list[RolloutRequest]]:
        pieces = self.pieces(requests, num_workers)
        if not any(piece.is_known for piece in pieces):
            return [queue_of(pieces[worker::num_workers]) for worker in range(num_workers)]
        pieces.sort(key=lambda piece: (piece.duration, piece.tail))
        groups = self._groups(pieces, num_workers)
        shares = [share for group, count in groups for share in cut(group, count)]
        longest = [_longest(group) for group, count in groups for _ in range(count)]
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

    def _groups(self, pieces: Sequence[Piece], num_workers: int) -> list[Group]:
        """Return the groups in ascending order of length."""
        single = [(group, 1) for group in cut(pieces, num_workers)]
        number = max(round(self.groups_per_worker * num_workers), 1)
        if self.tier == 1 or number >= num_workers:
            return single
        groups = cut(pieces, number)
        tau = np.array([[max(map(self.time, cut(group, k + 1))) for k in range(self.max_workers)] for group in groups])
        counts = linear_workers(tau, num_workers, train_time=self.train_time)
        if counts is None:
            return single
        totals = [sum(piece.total for piece in group) for group in groups]
        several = list(zip(groups, share_out(counts, totals, num_workers), strict=True))
        return single if self._two_steps(single) < self._two_steps(several) else several

    def _two_steps(self, groups: Sequence[Group]) -> float:
        """Return the predicted time of two steps in a row; the second assigns the groups in the opposite order."""
        times = np.array([self.time(share) for group, count in groups for share in cut(group, count)])
        return float((times + times[::-1]).max())


def cut(pieces: Sequence[Piece], count: int) -> list[Sequence[Piece]]:
    """`count` runs of neighbours whose numbers differ by at most one; empty ones where there are too few."""
    size, larger = divmod(len(pieces), count)
    bounds = [number * size + min(number, larger) for number in range(count + 1)]
    return [pieces[start:end] for start, end in pairwise(bounds)]


def linear_workers(tau: FloatArray, num_workers: int, *, train_time: float = 0.0) -> list[int] | None:
    """Return each group's workers, in ascending order of length; None if every slope needs too many.

    Column k - 1 of `tau` [groups, k_max] has the times of the groups on k workers. k_n is the smallest k for which
    tau(n, k) <= t0 + n d, where t0 is tau(0, k_max), or `train_time` if that is more. d is the smallest slope, found by
    bisection, for which the k_n sum to at most `num_workers`.
    """
    line, start = np.arange(len(tau))[:, None], max(float(tau[0, -1]), train_time)
    low, high = 0.0, 2.0 * float(tau.max())  # the first slope that is tried is enough if any is
    found: list[int] | None = None
    for _ in range(60):
        slope = (low + high) / 2
        within = tau <= start + slope * line
        counts = within.argmax(1) + 1
        if within.any(1).all() and counts.sum() <= num_workers:
            high, found = slope, counts.tolist()
        else:
            low = slope
    return found


def share_out(counts: Sequence[int], totals: Sequence[float], num_workers: int) -> list[int]:
    """Return `counts` with spare workers added, each to the group whose tokens per worker fall most."""
    found = list(counts)

    def saving(group: int) -> tuple[float, int]:
        return -totals[group] / (found[group] * (found[group] + 1)), group

    savings = [saving(group) for group in range(len(found))]
    heapq.heapify(savings)
    for _ in range(num_workers - sum(found)):
        group = savings[0][1]
        found[group] += 1
        heapq.heapreplace(savings, saving(group))
    return found


def _longest(group: Sequence[Piece]) -> float:
    return max((piece.tail for piece in group), default=0.0)


def outliers_to_running(progress: Progress, longest: FloatArray, *, alpha: float, beta: float) -> list[Move]:
    """Return moves of requests that delay their worker and have outgrown their group, to longer running groups.

    A request moves when at most the share `alpha` of its worker's requests is unfinished and it is longer than `beta`
    times longest[worker]. It goes where the longest group runs; of equals, to the worker with the fewest unfinished
    requests.
    """
    unfinished = np.bincount(progress.workers, minlength=len(progress.planned))
    is_last = unfinished <= np.maximum(alpha * progress.planned, 1)
    outgrown = is_last[progress.workers] & (progress.num_tokens > beta * longest[progress.workers])
    moves: list[Move] = []
    for index in np.flatnonzero(outgrown).tolist():
        source = int(progress.workers[index])
        targets = np.flatnonzero(~is_last & (unfinished > 0) & (longest > longest[source]))
        if len(targets) == 0:
            continue
        target = int(targets[np.lexsort((targets, unfinished[targets], -longest[targets]))[0]])
        unfinished[target] += 1
        moves.append(Move(request_id=progress.requests[index].id, worker=target))
    return moves
