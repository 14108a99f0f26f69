"""A plan on its way from rank 0 to all others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rhymerl.errors import ConfigError, HookError
from rhymerl.hooks import Hooks, place_of
from rhymerl.schedulers.base import Plan, Scheduler, check_plan, plan_hash
from rhymerl.types import RolloutRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPlan:
    """Queues as places in the step's list of requests, which every rank has, and a hash of the requests meant."""

    queues: Sequence[Sequence[int]]
    digest: str


def make_plan(
    scheduler: Scheduler, requests: Sequence[RolloutRequest], *, num_workers: int, step: int | str
) -> SharedPlan:
    """Ask the scheduler, on rank 0. Raises HookError, naming scheduler and request, for a plan that is no partition."""
    with Hooks("scheduler", scheduler):
        plan = scheduler.plan(requests, num_workers, step if isinstance(step, int) else 0)
    try:
        check_plan(plan, requests, num_workers=num_workers, scheduler=type(scheduler).__name__)
    except ValueError as error:
        raise HookError(f"{error} ({place_of(scheduler, 'plan')})") from error
    place = {request.id: number for number, request in enumerate(requests)}
    queues = [[place[request.id] for request in queue] for queue in plan]
    return SharedPlan(queues=queues, digest=plan_hash(plan))


def take_up(shared: SharedPlan, requests: Sequence[RolloutRequest], *, rank: int) -> Plan:
    """The plan again, on any rank. Raises ConfigError where this rank's requests are not rank 0's."""
    places = [place for queue in shared.queues for place in queue]
    if len(places) == len(requests):
        plan = [[requests[place] for place in queue] for queue in shared.queues]
        if plan_hash(plan) == shared.digest:
            return plan
    first = requests[0].id if requests else "none"
    raise ConfigError(
        f"rank {rank} has other prompts than rank 0 in this step ({len(requests)} requests from {first!r} on, {len(places)} planned): "
        "every rank needs the whole step's prompts, so nothing may split them by rank (a loader with a distributed sampler, "
        "data files or data.seed that differ between nodes)"
    )
