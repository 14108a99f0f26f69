"""The times at which workers become free, from what they have not finished yet."""

from __future__ import annotations

import numpy as np

from rhymerl.schedulers.base import Progress
from rhymerl.schedulers.predicting import PredictingScheduler
from rhymerl.types import FloatArray

_AT_LEAST = 0.1  # an answer beyond its prediction is expected to grow by this share of what it has


class ReleaseAwareScheduler(PredictingScheduler):
    """Plans a step with what is unfinished of the one before, which it observes right before."""

    _progress: Progress | None = None

    def observe(self, progress: Progress) -> None:
        self._progress = progress

    def unfinished(self, step: int) -> Progress | None:
        """Return what is unfinished of the step before `step`; None when it is over, or was never begun."""
        return self._progress if self._progress is not None and self._progress.step == step - 1 else None

    def releases(self, step: int, num_workers: int) -> FloatArray:
        """Return the time until each worker is free for `step`, [W], in the costs' unit; zeros if none is busy."""
        progress = self.unfinished(step)
        longest, total = np.zeros(num_workers), np.zeros(num_workers)
        if progress is None or len(progress.planned) != num_workers or not len(progress.requests):
            return longest
        predicted = [self.lengths.predict(request) for request in progress.requests]
        limits = np.array([request.sampling.max_tokens for request in progress.requests], np.float64)
        sampled = np.asarray(progress.num_tokens, np.float64)
        tails = np.array([each.tail for each in predicted])
        medians = np.array([each.median for each in predicted])
        beyond = np.minimum((1 + _AT_LEAST) * sampled, limits)  # of an answer that has outgrown its prediction
        longer = np.maximum(np.where(sampled < tails, tails, beyond) - sampled, 1.0)
        likely = np.maximum(
            np.where(sampled < medians, medians, np.where(sampled < tails, tails, beyond)) - sampled, 1.0
        )
        left = np.maximum(1 - sampled / np.maximum(medians, 1.0), 0.0)  # turns are taken to be of one length
        waits = left * [self.waits.predict(request) for request in progress.requests]
        np.maximum.at(longest, progress.workers, longer + waits)
        np.add.at(total, progress.workers, likely)
        return self.cost.time(longest, total)
