"""Seer (arXiv 2511.14617): divided rollout and context-aware scheduling."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from benchmarks.scheduling.peers.base import is_uneven, redeal
from rhymerl.schedulers import Move, Progress, Scheduler
from rhymerl.types import RolloutRequest


class SeerScheduler(Scheduler):
    """A group's first request goes first; its length predicts the group's, and the longest groups go next.

    A group's estimate is the longest of its finished answers, and the limit before there is one. Groups are divided:
    waiting requests stand in one queue for all workers, by estimate. Running ones are divided too, into `chunks` of the
    limit: at the end of a chunk a request may go on where fewer requests run.

    Its workers share a pool of keys and values: the tournament computes nothing again for a request that moves. Left
    out: speculative decoding within a group, an order among the first requests by what they have sampled so far, and
    that a request goes back to the queue at the end of a chunk while others wait. `Progress` does not say how long
    finished answers were: they count as what was seen of them last.
    """

    def __init__(self, *, chunks: int = 8) -> None:
        self.chunks = chunks
        self._sampled: dict[str, int] = {}  # by the id of an unfinished request
        self._prompts: dict[str, str] = {}
        self._estimates: dict[str, int] = {}  # by prompt
        self._first: set[str] = set()
        self._chunk: dict[str, int] = {}  # by request: the chunk in which it has moved

    def plan(self, requests: Sequence[RolloutRequest], num_workers: int, step: int) -> list[list[RolloutRequest]]:
        self._sampled = {request.id: 0 for request in requests}
        self._prompts = {request.id: request.prompt.id for request in requests}
        self._first = set({request.prompt.id: request.id for request in reversed(requests)}.values())
        self._estimates, self._chunk = {}, {}
        order = sorted(requests, key=lambda request: request.id not in self._first)
        return [order[worker::num_workers] for worker in range(num_workers)]

    def rebalance(self, progress: Progress) -> list[Move]:
        is_new = self._note(progress)
        if not (progress.num_tokens == 0).any():
            return self._divided(progress)
        return redeal(progress, self._priority) if is_new or is_uneven(progress) else []

    def _note(self, progress: Progress) -> bool:
        """Note what has ended since the last look; return whether an estimate has changed."""
        sampled = {
            request.id: count for request, count in zip(progress.requests, progress.num_tokens.tolist(), strict=True)
        }
        is_new = False
        for name in self._sampled.keys() - sampled.keys():
            prompt = self._prompts[name]
            if self._sampled[name] > self._estimates.get(prompt, -1):
                self._estimates[prompt] = self._sampled[name]
                is_new = True
        self._sampled = sampled
        return is_new

    def _priority(self, request: RolloutRequest) -> tuple[bool, float]:
        return request.id not in self._first, -self._estimates.get(request.prompt.id, math.inf)

    def _divided(self, progress: Progress) -> list[Move]:
        """Return the moves that even out running requests per worker; at a chunk's end the shortest go first."""
        counts = np.bincount(progress.workers, minlength=len(progress.planned))
        moves: list[Move] = []
        for index in np.argsort(progress.num_tokens, kind="stable").tolist():
            source, target = int(progress.workers[index]), int(counts.argmin())
            request = progress.requests[index]
            chunk = int(progress.num_tokens[index]) * self.chunks // request.sampling.max_tokens
            if counts[source] - counts[target] > 1 and chunk > self._chunk.get(request.id, 0):
                counts[source] -= 1
                counts[target] += 1
                self._chunk[request.id] = chunk
                moves.append(Move(request_id=request.id, worker=target))
        return moves
