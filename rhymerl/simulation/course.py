"""One worker decoding one queue with continuous batching, in closed form: no token is simulated."""

from __future__ import annotations

import numpy as np

from rhymerl.budgets.timeline import starts_of
from rhymerl.simulation.base import Decoding
from rhymerl.types import FloatArray


class Course:
    """A queue of n requests from time `start` on, with `tokens` [n] to sample.

    The first `drafts` [n] of them are along prefetched tokens. Requests enter in order, as many side by side as
    `decoding.max_running` allows. How many prefetched tokens a pass verifies follows from the first batch. Between two
    events (a request enters, has used up its drafts, or ends) every pass is alike, so the time of an event is a sum
    over the events before.
    """

    def __init__(self, start: float, tokens: FloatArray, drafts: FloatArray, decoding: Decoding) -> None:
        self.start = start
        self.tokens = tokens
        self._drafts = drafts
        self._has_drafts = bool(drafts.any())
        self._decoding = decoding
        first = int((drafts[: decoding.max_running] > 0).sum())
        self._nodes = decoding.nodes_that_pay(first, len(drafts[: decoding.max_running]) - first) if first else 0
        self._redo_tokens = float(decoding.redo_tokens[self._nodes])
        redone = drafts / self._redo_tokens
        passes = redone + (tokens - drafts) / decoding.tokens_per_pass
        slots = decoding.max_running or len(passes)
        starts = starts_of(passes, slots) if slots < len(passes) else np.zeros(len(passes))
        self._enters: FloatArray = starts  # all in passes of this worker
        self._redone = self._enters + redone
        leaves = self._enters + passes
        self._knots, self._times = self._clock(leaves)
        self.firsts = np.interp(self._enters, self._knots, self._times)  # [n] when a request enters
        self.ends = np.interp(leaves, self._knots, self._times)  # [n] and ends
        self.end = float(self._times[-1])

    def _clock(self, leaves: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Return the pass numbers of all events and their times."""
        plain, redo = self._decoding.verified, 1.0 + self._nodes
        first = np.where(self._drafts > 0, redo, plain)
        indices = np.concatenate([self._enters, self._redone, leaves])
        changes = np.concatenate([first, plain - first, np.full(len(leaves), -plain)])
        order = np.argsort(indices, kind="stable")
        knots = np.concatenate([[0.0], indices[order]])
        load = np.concatenate([[0.0], np.cumsum(changes[order])])[:-1]  # in front of each event
        lasting = np.diff(knots)
        cost = np.zeros(len(lasting))
        some = lasting > 0
        cost[some] = lasting[some] * self._decoding.pass_cost(load[some])
        return knots, self.start + np.concatenate([[0.0], np.cumsum(cost)])

    def waited(self, time: float) -> float:
        """Nobody waits for an environment."""
        return 0.0

    def sampled(self, time: float) -> FloatArray:
        """Return how many tokens each request has at a time, [n]."""
        if time >= self.end:
            return self.tokens
        now = float(np.interp(time, self._times, self._knots))
        if not self._has_drafts:
            return np.minimum(np.maximum(now - self._enters, 0.0) * self._decoding.tokens_per_pass, self.tokens)
        redo = np.minimum(np.maximum(now, self._enters), self._redone) - self._enters
        plain = np.maximum(now - self._redone, 0.0) * self._decoding.tokens_per_pass
        return np.minimum(redo * self._redo_tokens + plain, self.tokens)
