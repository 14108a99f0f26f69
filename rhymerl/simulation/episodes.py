"""One worker decodes a queue of episodes, event by event: others take the slot of an episode that waits."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from math import inf
from typing import NamedTuple

import numpy as np

from rhymerl.simulation.base import Decoding
from rhymerl.types import FloatArray, IndexArray


class SimulatedTurn(NamedTuple):
    """What a turn takes: passes, what each of them verifies for it, and the wait behind it."""

    passes: float
    verified: float
    wait: float


class EpisodeCourse:
    """The same as `Course` for n episodes of T turns with `tokens` [n, T], each with the `waits` [n, T] behind it.

    Turns enter in the order in which they can, as in an engine: first of all those of the queue, and behind them one
    that goes on. Between two events (a turn enters, ends, or is replied to) every pass is alike. A turn that is partly
    along prefetched tokens verifies the mean of both parts in all of its passes.
    """

    def __init__(
        self, start: float, tokens: FloatArray, waits: FloatArray, drafts: FloatArray, decoding: Decoding
    ) -> None:
        self.start = start
        self._tokens, self._waits = tokens, waits
        self._decoding = decoding
        self._passes = np.zeros(tokens.shape)
        self._turns = self._of_turns(drafts)
        self.firsts = np.full(len(tokens), float(start))  # [n] when an episode enters
        self.ends = np.full(len(tokens), float(start))  # [n] and ends
        self._now, self._done, self._load = start, 0.0, 0.0  # passes so far, and what the next one verifies
        self._turn = [-1] * len(tokens)  # of each episode, the one that it is in
        self._ready: deque[int] = deque()
        self._running: list[tuple[float, int]] = []  # a heap: the pass in which a turn ends, and the episode
        self._waiting: list[tuple[float, int]] = []  # a heap: the time of a reply
        self._entered: list[tuple[int, int, float]] = []  # episode, turn, and the pass in which it enters
        self._asked: list[tuple[int, float, float]] = []  # episode, from when on it waits, and how long
        self._knots, self._times = [0.0], [start]  # passes, and when so many are done
        self._costs: dict[float, float] = {}  # of a pass that verifies so many tokens
        self._decode()
        self.end = float(self.ends.max(initial=start))

    def _of_turns(self, drafts: FloatArray) -> list[list[SimulatedTurn]]:
        first = drafts[: self._decoding.max_running] > 0
        nodes = self._decoding.nodes_that_pay(int(first.sum()), int((~first).sum())) if first.any() else 0
        before = self._tokens.cumsum(1) - self._tokens
        drafted = np.clip(drafts[:, None] - before, 0.0, self._tokens)
        redone = drafted / float(self._decoding.redo_tokens[nodes])
        plain = (self._tokens - drafted) / self._decoding.tokens_per_pass
        self._passes = redone + plain
        verified = redone * (1 + nodes) + plain * self._decoding.verified
        columns = (self._passes, verified / np.maximum(self._passes, 1e-12), self._waits)
        return [list(map(SimulatedTurn, *row)) for row in zip(*(column.tolist() for column in columns), strict=True)]

    def _decode(self) -> None:
        for number in range(len(self._turn)):
            self._go_on(number)
        while self._ready or self._running or self._waiting:
            self._admit()
            cost = self._cost() if self._running else inf
            ends_at = self._now + (self._running[0][0] - self._done) * cost if self._running else inf
            if self._waiting and self._waiting[0][0] <= ends_at:
                then, number = heapq.heappop(self._waiting)
                self._done += (then - self._now) / cost
                self._now = then
                self._go_on(number)
            else:
                self._now = ends_at
                self._done, number = heapq.heappop(self._running)
                self._load -= self._turns[number][self._turn[number]].verified
                self._ask(number)
            self._knots.append(self._done)
            self._times.append(self._now)

    def _cost(self) -> float:
        cost = self._costs.get(self._load)
        if cost is None:
            cost = self._costs[self._load] = float(self._decoding.pass_cost(np.array(self._load)))
        return cost

    def _admit(self) -> None:
        while self._ready and len(self._running) < (self._decoding.max_running or inf):
            number = self._ready.popleft()
            turn = self._turn[number]
            if not turn:
                self.firsts[number] = self._now
            self._entered.append((number, turn, self._done))
            heapq.heappush(self._running, (self._done + self._turns[number][turn].passes, number))
            self._load += self._turns[number][turn].verified

    def _go_on(self, number: int) -> None:
        """Begin an episode's next turn, if there is one."""
        self._turn[number] += 1
        if self._turn[number] == len(self._turns[number]):
            self.ends[number] = self._now
        elif not self._turns[number][self._turn[number]].passes:  # it has been sampled before
            self._ask(number)
        else:
            self._ready.append(number)

    def _ask(self, number: int) -> None:
        """A turn has ended, and its environment is asked."""
        wait = self._turns[number][self._turn[number]].wait
        if wait:
            self._asked.append((number, self._now, wait))
            heapq.heappush(self._waiting, (self._now + wait, number))
        else:
            self._go_on(number)

    def sampled(self, time: float) -> FloatArray:
        """Return how many tokens each episode has at a time, [n]."""
        done = np.interp(time, self._times, self._knots)
        number, turn, enters = _columns(self._entered)
        place = number.astype(np.int64), turn.astype(np.int64)
        share = np.clip((done - enters) / self._passes[place], 0.0, 1.0)
        return self._summed(number, share * self._tokens[place])

    def waited(self, time: float) -> FloatArray:
        """Return how long each episode has waited at a time, [n]."""
        number, since, wait = _columns(self._asked)
        return self._summed(number, np.clip(time - since, 0.0, wait))

    def _summed(self, number: FloatArray, values: FloatArray) -> FloatArray:
        return np.asarray(np.bincount(number.astype(np.int64), values, minlength=len(self._tokens)), np.float64)


def left_of(whole: FloatArray, turns: IndexArray, done: FloatArray) -> FloatArray:
    """Return what is left of n quantities in each of their `turns` equal parts, [n, T], after `done` of each."""
    ends = np.minimum(np.arange(int(turns.max(initial=0)) + 1) / turns[:, None], 1.0)
    return np.diff(np.maximum(ends * whole[:, None], done[:, None]), axis=1)


def _columns(rows: Sequence[tuple[int, float, float]]) -> FloatArray:
    return np.array(rows, np.float64).reshape(-1, 3).T
