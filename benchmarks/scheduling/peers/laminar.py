"""Laminar (arXiv 2510.12633): the repack of long-tailed answers."""

from __future__ import annotations

import numpy as np

from rhymerl.schedulers import FIFOScheduler, Move, Progress


class LaminarScheduler(FIFOScheduler):
    """Packs workers that ramp down onto as few as hold their requests; the others are free for the next step.

    A worker ramps down when nothing waits on it and its keys and values have become fewer since the last look. From the
    emptiest on, each gives all its requests to the fullest other one where they fit (best fit): together at most
    `max_requests`, so that passes stay cheap, and at most as many tokens as any worker has had.

    Left out: answers that are trained on one by one as they end, from a buffer, and workers that fetch weights whenever
    they are free. Here, as with all of rhymerl's rules, the answers of a step are trained on together and are at most
    one step old.
    """

    def __init__(self, *, max_requests: int = 32) -> None:
        self.max_requests = max_requests
        self._step = -1
        self._before = np.zeros(0)  # [W] tokens at the last look
        self._most = 0.0

    def rebalance(self, progress: Progress) -> list[Move]:
        num_workers = len(progress.planned)
        tokens = np.bincount(progress.workers, weights=progress.num_tokens, minlength=num_workers)
        counts = np.bincount(progress.workers, minlength=num_workers)
        waiting = np.bincount(progress.workers[progress.num_tokens == 0], minlength=num_workers)
        before = self._before if self._step == progress.step else np.zeros(num_workers)
        self._step, self._before, self._most = progress.step, tokens, max(self._most, float(tokens.max()))
        down = np.flatnonzero((waiting == 0) & (counts > 0) & (tokens < before))
        targets = self._packed(down[np.argsort(tokens[down], kind="stable")].tolist(), tokens.copy(), counts)
        return [
            Move(request_id=request.id, worker=targets[worker])
            for request, worker in zip(progress.requests, progress.workers.tolist(), strict=True)
            if worker in targets
        ]

    def _packed(self, down: list[int], tokens: np.ndarray, counts: np.ndarray) -> dict[int, int]:
        """Return where the requests of each worker go that becomes free."""
        targets: dict[int, int] = {}
        for source in down:
            if source in targets.values():
                continue
            fitting = [
                worker
                for worker in down
                if worker != source
                and worker not in targets
                and counts[worker] + counts[source] <= self.max_requests
                and tokens[worker] + tokens[source] <= self._most
            ]
            if fitting:
                target = max(fitting, key=lambda worker: (tokens[worker], -worker))
                targets[source] = target
                tokens[target] += tokens[source]
                counts[target] += counts[source]
        return targets
