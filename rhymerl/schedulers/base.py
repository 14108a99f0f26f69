"""What a scheduler is: it decides which worker answers which request, and in which order."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from rhymerl.types import RolloutRequest, Sample


class Scheduler(ABC):
    """Subclass this and write `plan`; every other hook is an optional no-op."""

    @abstractmethod
    def plan(self, requests: Sequence[RolloutRequest], num_workers: int, step: int) -> list[list[RolloutRequest]]:
        """One queue a worker: a partition of `requests`, each queue in the order of submission. Called on rank 0."""

    def learn(self, samples: Sequence[Sample]) -> None:
        """The finished answers of a step, in canonical (prompt, sample) order."""

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs, as plain containers."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what `state_dict` returned."""


def check_plan(
    plan: Sequence[Sequence[RolloutRequest]], requests: Sequence[RolloutRequest], *, num_workers: int, scheduler: str
) -> None:
    """Raise ValueError when `plan` drops, doubles or invents a request or has the wrong number of queues."""
    if len(plan) != num_workers:
        raise ValueError(f"{scheduler}.plan returned {len(plan)} queues for {num_workers} workers")
    planned = [request.id for queue in plan for request in queue]
    asked = {request.id for request in requests}
    twice = {name for name in planned if planned.count(name) > 1} if len(set(planned)) < len(planned) else set()
    for wrong, names in (
        ("doubles", twice),
        ("invents", set(planned) - asked),
        ("drops", asked - set(planned)),
    ):
        if names:
            raise ValueError(f"{scheduler}.plan {wrong} the request {min(names)!r} ({len(names)} such)")
