"""A budget for tests: passes have RHYMERL_TEST_WIDTHS' sizes, in turn, and note them in RHYMERL_TEST_WIDTHS_SEEN."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from rhymerl.backends.sglang.plugin.drafting import EngineDrafting
from rhymerl.backends.sglang.plugin.settings import EngineSettings
from rhymerl.budgets import UniformGoodputBudget
from rhymerl.drafts import DraftBatch

VARIABLE, SEEN = "RHYMERL_TEST_WIDTHS", "RHYMERL_TEST_WIDTHS_SEEN"


class ScheduledBudget(UniformGoodputBudget):
    """Each time that nodes are 0 the drafter is left alone and asked for nothing in turn."""

    def __init__(self, schedule: Sequence[int]) -> None:
        super().__init__(sorted(set(schedule)))
        self.schedule = schedule
        self.now = self.passes = self.zeros = 0

    def skips(self, num_requests: int) -> int:
        self.now = self.schedule[self.passes % len(self.schedule)]
        self.passes += 1
        self.zeros += self.now == 0
        return int(self.now == 0 and self.zeros % 2)

    def limits(self, requests: Any) -> Any:
        return np.full(len(requests), self.now, np.int32)

    def trim(self, requests: Any, drafts: Any) -> Any:
        return np.ones(len(drafts.token_ids), np.bool_)


_smallest_width = EngineDrafting._width


def _width(drafting: EngineDrafting, drafts: DraftBatch) -> int:
    """Return the scheduled size, not the smallest that holds the largest draft; a warm-up has no schedule."""
    if not isinstance(drafting.budget, ScheduledBudget):
        return _smallest_width(drafting, drafts)
    now = drafting.budget.now
    assert int(drafts.counts.max(initial=0)) <= now
    with open(os.environ[SEEN], "a") as seen:
        print(now, file=seen)
    return now


def install() -> None:
    """Give this process's engine such a budget, where a test asks for it."""
    if schedule := [int(width) for width in os.environ.get(VARIABLE, "").split(",") if width]:
        EngineSettings.budget_of = lambda self, n: ScheduledBudget(schedule)
        EngineDrafting._width = _width
