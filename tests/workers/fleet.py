"""A rollout loop over workers in threads, and what one process gives instead."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

from torch import nn

from benchmarks.emulation.threads import ThreadBackend
from rhymerl.drafters import NoDrafter
from rhymerl.rewards import RewardScorer
from rhymerl.rollout import Rollout, RolloutLoop
from rhymerl.schedulers import FIFOScheduler
from tests.rollout.ranked import REWARD, Ranked, length, run_step
from tests.rollout.tokens import TokenBackend

NO_POLICY = SimpleNamespace(model=nn.Module(), named_weights=list)


@contextmanager
def fleet(
    scheduler=FIFOScheduler,
    *,
    workers: int = 3,
    pass_s: float = 0.0,
    make=None,
    backend=None,
    ranks=None,
    scorer=None,
    **settings,
) -> Iterator[tuple[RolloutLoop, ThreadBackend]]:
    """A loop over workers in threads, some slower than others."""
    backend = backend or ThreadBackend(make or (lambda number: TokenBackend(length, pass_s=pass_s * (1 + number))))
    with backend:
        backend.start(NO_POLICY, NoDrafter())
        loop = RolloutLoop(
            backend,
            scheduler(),
            scorer=scorer or RewardScorer([REWARD]),
            decode=lambda ids: " ".join(map(str, ids)),
            num_workers=workers,
            ranks=ranks,
            **settings,
        )
        try:
            yield loop, backend
        finally:
            loop.close()


def run(loop: RolloutLoop, steps, *, update_s: float = 0.0) -> list[Rollout]:
    found = []
    for step in steps:
        found.append(run_step(loop, step))
        time.sleep(update_s)
    return found


def alone(num_steps: int) -> list[Rollout]:
    return Ranked(size=1).run(num_steps)[0]
