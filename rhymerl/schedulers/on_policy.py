"""Plans for workers that wait for one another: nothing of a step is trained on before its last answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rhymerl.schedulers.base import Plan, Scheduler
from rhymerl.schedulers.predicting import Piece, PredictingScheduler
from rhymerl.schedulers.sorted import longest_first
from rhymerl.types import RolloutRequest

_SOONER = 0.95  # times as long: predictions are no better than that


class OnPolicyScheduler(Scheduler):
    """Takes the plan of `inner`, or that of `sorted` where its slowest worker is predicted to finish clearly sooner.

    Similar lengths on a worker pay only where workers need not wait for one another. Lengths and costs are those of
    `inner`, which alone learns; nothing moves, because moves go with the plan that was made for them.
    """

    def __init__(self, inner: PredictingScheduler) -> None:
        self.inner = inner

    def plan(self, requests: Sequence[RolloutRequest], num_workers: int, step: int) -> list[list[RolloutRequest]]:
        own = self.inner.plan(requests, num_workers, step)
        pieces = self.inner.pieces(requests, num_workers)
        balanced = longest_first(pieces, num_workers)
        by_prompt = {piece.requests[0].prompt.id: piece for piece in pieces}
        return balanced if self._end(balanced, by_prompt) < _SOONER * self._end(own, by_prompt) else own

    def _end(self, plan: Plan, by_prompt: Mapping[str, Piece]) -> float:
        """Return when the slowest worker is predicted to finish."""
        return max(self.inner.time([by_prompt[request.prompt.id] for request in queue], whole=False) for queue in plan)


def on_policy(scheduler: Scheduler) -> Scheduler:
    """Return the scheduler for workers that wait for one another: one that predicts no lengths is left as it is."""
    if not isinstance(scheduler, PredictingScheduler):
        return scheduler
    return OnPolicyScheduler(scheduler)
