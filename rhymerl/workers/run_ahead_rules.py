"""The rules by which workers begin the next step or wait: one for each value of `run_ahead`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rhymerl.drafts import DraftSource
from rhymerl.schedulers.base import Scheduler
from rhymerl.schedulers.on_policy import on_policy
from rhymerl.types import Sample
from rhymerl.workers.base import RunAhead

_LEAST = 0.02  # of a step's tokens
_AGAIN = 8  # steps


class RunAheadRule:
    """Begins every step ahead, and with `off` none. All ranks ask it alike."""

    def __init__(self, mode: RunAhead) -> None:
        self.mode = mode  # what workers do with a step that is begun

    def planner(self, scheduler: Scheduler) -> Scheduler:
        """Return what makes the plans."""
        return scheduler

    def begins(self) -> bool:
        """Return whether workers begin the step after the current one; asked once per step that has a next one."""
        return self.mode != "off"

    def learn(self, samples: Sequence[Sample]) -> None:
        """Learn from the samples of the current step, which is over."""

    def note(self, share: float | None) -> None:
        """Note the share of the current step's tokens that was sampled ahead, None if unknown; the step is over."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what `state_dict` returned."""


class DraftWherePays(RunAheadRule):
    """Begins the next step ahead, unless less than 2 % of the tokens of the latest such step were prefetched.

    Prefetched tokens pay if the next policy samples them again, many in a pass. That depends on how far an update moves
    the policy, on the lengths of answers and on the workers' spare time; the share of prefetched tokens in a step
    measures all of it. Every eighth step is begun regardless of the share, because updates may have become smaller.
    """

    def __init__(self) -> None:
        super().__init__("draft")
        self._share = 1.0
        self._num_waits = 0  # steps in a row that were not begun ahead
        self._is_ahead = self._is_next_ahead = False  # the step under way, and the one after it

    def planner(self, scheduler: Scheduler) -> Scheduler:
        return on_policy(scheduler)

    def begins(self) -> bool:
        self._is_next_ahead = self._share >= _LEAST or self._num_waits >= _AGAIN - 1
        self._num_waits = 0 if self._is_next_ahead else self._num_waits + 1
        return self._is_next_ahead

    def learn(self, samples: Sequence[Sample]) -> None:
        self.note(share_ahead(samples))

    def note(self, share: float | None) -> None:
        if self._is_ahead and share is not None:
            self._share = share
        self._is_ahead, self._is_next_ahead = self._is_next_ahead, False

    def state_dict(self) -> dict[str, Any]:
        return {"share": self._share, "num_waits": self._num_waits, "is_ahead": self._is_ahead}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._share, self._num_waits, self._is_ahead = state["share"], state["num_waits"], state["is_ahead"]


def rule_of(run_ahead: RunAhead) -> RunAheadRule:
    """Return the rule of a mode."""
    return DraftWherePays() if run_ahead == "auto" else RunAheadRule(run_ahead)


def share_ahead(samples: Sequence[Sample]) -> float | None:
    """Return the share of tokens that were accepted of those sampled ahead; None for an engine that does not tell."""
    sources = [sample.completion.output.sources for sample in samples]
    known = [each for each in sources if each is not None]
    if not known:
        return None
    num_sampled = sum(sample.num_sampled for sample in samples if sample.completion.output.sources is not None)
    return sum(int((each == DraftSource.RUN_AHEAD).sum()) for each in known) / max(num_sampled, 1)
