"""The workers that answer requests: on the trainer's ranks, or apart from them."""

from typing import TYPE_CHECKING, Any, cast

from rhymerl.backends.base import Backend, RolloutBackend
from rhymerl.backends.spans import WorkerSpan
from rhymerl.distributed import Ranks
from rhymerl.environments.build import EpisodeSettings
from rhymerl.replayed import KeptSets
from rhymerl.schedulers.base import Scheduler
from rhymerl.types import Output, TurnEnd
from rhymerl.workers.base import RunAhead, Workers, check_run_ahead, follows_clock
from rhymerl.workers.coordinator import Command, ProgressReport, SharedPlan, StepRequests
from rhymerl.workers.ranks import MovedRequest, RankWorkers
from rhymerl.workers.remote.base import HostedBackend
from rhymerl.workers.remote.hosted import HostedWorkers
from rhymerl.workers.remote.servers import ServersBackend
from rhymerl.workers.run_ahead_state import RunAheadState

if TYPE_CHECKING:
    from rhymerl.backends.sglang.backend import SGLangBackend

# What travels between the workers of ranks, apart from plain data and arrays.
RECORDS: tuple[type, ...] = (
    Command,
    KeptSets,
    MovedRequest,
    Output,
    ProgressReport,
    RunAheadState,
    SharedPlan,
    TurnEnd,
    WorkerSpan,
)


def backend_of_workers(backend: Backend) -> Backend:
    """Return the backend that starts a run's workers: itself, or a wrapper if running servers are its workers."""
    return ServersBackend(cast("SGLangBackend", backend)) if backend.has_servers else backend


def workers_of(
    backend: Backend,
    scheduler: Scheduler,
    *,
    num_workers: int | None,
    ranks: Ranks,
    run_ahead: RunAhead,
    max_staleness: int,
    lockstep: bool,
    episodes: EpisodeSettings | None = None,
) -> Workers:
    """Return the workers of a backend that has been started; `num_workers` None = one a rank, or as many as there are.

    Raises ValueError for arguments that contradict one another.
    """
    settings: dict[str, Any] = {
        "scheduler": scheduler,
        "ranks": ranks,
        "run_ahead": run_ahead,
        "max_staleness": max_staleness,
        "lockstep": lockstep,
        "episodes": episodes,
    }
    if isinstance(backend, HostedBackend):
        number = 0 if ranks.rank else num_workers or backend.num_workers(ranks.size)
        return HostedWorkers(backend=backend, num_workers=number, **settings)
    assert isinstance(backend, RolloutBackend)
    if num_workers not in (None, ranks.size):
        raise ValueError(
            f"workers={num_workers}: with {type(backend).__name__} every rank is a worker; expected null, {ranks.size}, or backend=ray"
        )
    return RankWorkers(backend=backend, **settings)


__all__ = [
    "RECORDS",
    "RankWorkers",
    "RunAhead",
    "RunAheadState",
    "StepRequests",
    "Workers",
    "backend_of_workers",
    "check_run_ahead",
    "follows_clock",
    "workers_of",
]
