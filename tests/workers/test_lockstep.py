"""Workers apart from the ranks, in lockstep: their passes do not follow the clock."""

from __future__ import annotations

import pytest

from rhymerl.schedulers import FIFOScheduler
from tests.rollout.ranked import Restless, length, run_step
from tests.workers.fleet import fleet
from tests.workers.late import LateBackend, NotingBackend, Pass

SCHEDULERS = [FIFOScheduler, Restless]


def passes_of(scheduler, run_ahead, *, seed=0, late_s=0.0) -> list[list[Pass]]:
    """The passes of each of three workers in five steps."""
    engines: list[NotingBackend] = []

    def make(number: int) -> NotingBackend:
        engines.append(NotingBackend(length))
        return engines[-1]

    backend = LateBackend(make, seed=seed, late_s=late_s)
    with fleet(scheduler, backend=backend, run_ahead=run_ahead, lockstep=True) as (loop, _):
        for step in range(5):
            run_step(loop, step)
    return [engine.passes for engine in engines]


@pytest.mark.parametrize("run_ahead", ["draft", "keep"])
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_passes_are_the_same_however_late_messages_are(scheduler, run_ahead):
    """Also where a worker begins an exchange only after another one has told of it, and requests move between them."""
    punctual = passes_of(scheduler, run_ahead)
    for seed in range(8):
        assert passes_of(scheduler, run_ahead, seed=seed, late_s=0.005) == punctual
