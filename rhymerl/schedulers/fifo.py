"""First in, first out: data order, round robin over workers by prompt."""

from __future__ import annotations

from collections.abc import Sequence

from rhymerl.schedulers.base import Scheduler
from rhymerl.types import RolloutRequest


class FIFOScheduler(Scheduler):
    """The i-th distinct prompt goes to worker i modulo `num_workers`; a group stays together."""

    def plan(self, requests: Sequence[RolloutRequest], num_workers: int, step: int) -> list[list[RolloutRequest]]:
        queues: list[list[RolloutRequest]] = [[] for _ in range(num_workers)]
        order = {prompt_id: i for i, prompt_id in enumerate(dict.fromkeys(r.prompt.id for r in requests))}
        for request in requests:
            queues[order[request.prompt.id] % num_workers].append(request)
        return queues
