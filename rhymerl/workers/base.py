"""The workers that answer a step's requests; the rollout loop knows neither their number nor where they run."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from torch import Tensor

from rhymerl.backends.spans import WorkerSpan
from rhymerl.distributed import Ranks
from rhymerl.environments.build import EpisodeSettings
from rhymerl.errors import require_at_least
from rhymerl.history import HistoryStore
from rhymerl.schedulers.base import Scheduler
from rhymerl.types import Completion, Ratio, Sample
from rhymerl.workers.coordinator import Coordinator, SharedPlan, StepRequests
from rhymerl.workers.run_ahead_state import RunAheadState

REBALANCE_S = 0.5  # between two times when the scheduler is asked for moves
REBALANCE_EXCHANGES = 4  # the same in lockstep, where time is counted in exchanges
# What a worker does that has finished its queue while others have not:
# - off: it waits.
# - draft: it begins the next step, whose tokens are sampled again after the update, along the earlier ones as drafts.
# - keep: it begins the next step, and its tokens stay in the answers.
# - auto: off or draft, whichever pays (`DraftWherePays`).
RunAhead = Literal["off", "draft", "keep", "auto"]


def check_run_ahead(run_ahead: str, max_staleness: int) -> None:
    """Raise ValueError for a mode that does not exist, or that the staleness allowed (in steps) rules out."""
    if run_ahead not in get_args(RunAhead):
        raise ValueError(f"run_ahead={run_ahead!r}: expected one of {', '.join(get_args(RunAhead))}")
    require_at_least({"max_staleness": (max_staleness, 0)})
    if run_ahead == "keep" and max_staleness == 0:
        raise ValueError(
            "max_staleness=0: run_ahead=keep trains on tokens of the policy before; expected at least 1, or "
            "run_ahead=auto, draft or off"
        )


def follows_clock(scheduler: Scheduler, run_ahead: RunAhead) -> bool:
    """Return whether a worker's next action depends on the progress of all workers by then."""
    return scheduler.migrates or run_ahead != "off"


@dataclass(kw_only=True, eq=False, repr=False)
class Workers(ABC):
    """The workers of a run, which `scheduler` gives their work. Every rank calls all methods, in the same order.

    With `lockstep` nothing follows the clock, so that a run repeats bit for bit.
    """

    scheduler: Scheduler
    ranks: Ranks
    run_ahead: RunAhead = "off"
    max_staleness: int = 1
    lockstep: bool = False
    episodes: EpisodeSettings | None = None
    num_moves: int = field(init=False, default=0)  # requests that went to another worker in the latest `answer`
    # Over which the latest answers were sampled, where that is more than `answer` took.
    sampled_s: float | None = field(init=False, default=None)
    busy_s: float = field(init=False, default=0.0)  # of this rank's workers in the latest `answer`: their mean

    @abstractmethod
    def answer(self, work: StepRequests) -> Iterator[Completion]:
        """Yield the answers that this rank scores, each as it ends, until all ranks have theirs."""

    def coordinator(self, work: StepRequests, plan: SharedPlan, *, works_on: bool = False) -> Coordinator:
        """Return the coordinator of a step, which asks for moves every so many seconds, or exchanges in lockstep."""
        every, clock = (REBALANCE_EXCHANGES, None) if self.lockstep else (REBALANCE_S, time.monotonic)
        keeps = self.run_ahead == "keep"
        return Coordinator(self.scheduler, work, plan, keeps=keeps, every=every, clock=clock, works_on=works_on)

    @property
    def num_waiting(self) -> int:
        """Return how many episodes of this rank's workers wait for their environment, as far as it is told."""
        return 0

    @property
    def works_ahead(self) -> bool:
        """Return whether this rank gets answers to the next step before that step starts."""
        return False

    def ended_ahead(self) -> list[Completion]:
        """Return the next step's answers that ended since the last call; any thread may. `answer` yields them too."""
        return []

    def end_step(self) -> None:
        """Called when all ranks have exchanged the answers of the latest `answer`."""

    @abstractmethod
    def sync_weights(self, named_tensors: Iterable[tuple[str, Tensor]], policy_version: int) -> None:
        """Sample with these weights from now on."""

    @abstractmethod
    def learn(self, samples: Sequence[Sample]) -> None:
        """Let drafters learn from the scored answers of a step, in canonical order."""

    @abstractmethod
    def follow(self, history: HistoryStore) -> None:
        """Send the history's changes to the drafters."""

    @abstractmethod
    def state(self) -> RunAheadState | None:
        """Return this rank's state of the next step."""

    @abstractmethod
    def restore(self, state: RunAheadState | None) -> None:
        """Restore the state that all ranks had together."""

    def sleep(self) -> None:
        """Release memory until the next step, if the settings say so."""

    @abstractmethod
    def metrics(self) -> Mapping[str, float]:
        """Return the metrics of this rank's engines since the last call, by name."""

    def spans(self) -> list[WorkerSpan]:
        """Return the spans of this rank's workers since the last call."""
        return []

    def close(self) -> None:
        """End the workers; may be called twice. The backend closes its engines."""


def over_workers(each: Sequence[Mapping[str, float]], weights: Sequence[float]) -> dict[str, float]:
    """Return the metrics of all workers or ranks: sums of ints, ratios of sums, weighted means of other floats."""
    names = dict.fromkeys(name for metrics in each for name in metrics)
    return {name: _united(name, each, weights) for name in names}


def _united(name: str, each: Sequence[Mapping[str, float]], weights: Sequence[float]) -> float:
    found = [(metrics[name], weight) for metrics, weight in zip(each, weights, strict=True) if name in metrics]
    ratios = [value for value, _ in found if isinstance(value, Ratio)]
    if ratios:
        return float(Ratio(sum(ratio.part for ratio in ratios), sum(ratio.whole for ratio in ratios)))
    if all(isinstance(value, int) for value, _ in found):
        return float(sum(value for value, _ in found))
    if len({value for value, _ in found}) == 1:
        return float(found[0][0])  # as it is, without the mean's rounding
    total = sum(weight for _, weight in found)
    return sum(value * weight for value, weight in found) / total if total else float(found[0][0])
