"""A rollout loop over workers in threads, and what one process gives instead."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

from torch import nn

from rhymerl.backends.hosted.threads import ThreadBackend
from rhymerl.drafters import NoDrafter
from rhymerl.rewards import RewardScorer
from rhymerl.rollout import Rollout, RolloutLoop
from rhymerl.schedulers import FIFOScheduler
from tests.rollout.ranked import REWARD, Ranked, length, run_step
from tests.rollout.tokens import TokenBackend, expected

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


def check_kept(steps: list[Rollout]) -> int:
    """Every answer is there once, and its tokens are those of the policies that they name; returns how many are old."""
    stale = 0
    for step, rollout in enumerate(steps):
        assert len(rollout.samples) == len({s.completion.request.id for s in rollout.samples}) == 4 * 3
        for sample in rollout.samples:
            versions = sample.completion.output.policy_versions
            assert set(versions.tolist()) <= {step - 1, step}
            assert sample.completion.token_ids.tolist() == expected(sample.completion)
            assert len(sample) >= length(sample.completion.request)
            stale += int((versions < step).sum())
    return stale
