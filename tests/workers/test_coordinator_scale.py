"""The work of a step's coordinator grows with the requests and not faster, so it keeps up with a thousand workers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from rhymerl.rollout.base import RolloutSettings, requests_of
from rhymerl.schedulers import FIFOScheduler, HistoPipeScheduler, PacedScheduler, PackedScheduler, SortedScheduler
from rhymerl.schedulers.on_policy import on_policy
from rhymerl.testing import make_prompt
from rhymerl.types import Completion, Output, RolloutRequest, Sample
from rhymerl.workers import StepRequests
from rhymerl.workers.coordinator import Coordinator, ProgressReport, SharedPlan, make_plan
from tests.bytecodes import bytecodes

PROMPTS = [make_prompt([3, number % 997, number // 997], id=str(number)) for number in range(256)]
SETTINGS = RolloutSettings(group_size=8, max_tokens=16_384)


def requests(step: int, num_prompts: int) -> list[RolloutRequest]:
    prompts = PROMPTS[:num_prompts]
    return requests_of(prompts, step, SETTINGS, seed=0, stop_token_ids=[1], split="train", round_number=0)


def lengths(number: int) -> np.ndarray:
    """Long-tailed, and mostly the prompt's own."""
    draw = np.random.default_rng(0)
    own = np.repeat(draw.lognormal(7, 1, number // SETTINGS.group_size), SETTINGS.group_size)
    return np.minimum(own * draw.lognormal(0, 0.5, number), SETTINGS.max_tokens).astype(int) + 1


def answered(request: RolloutRequest, length: int) -> Sample:
    completion = Completion(request=request, output=Output.of(np.zeros(length), finish_reason="stop"))
    return Sample(completion=completion, text="", reward=0.0, rewards={}, loss_mask=np.ones(length, np.bool_))


@pytest.mark.parametrize(
    ("scheduler", "is_on_policy"),
    [
        (FIFOScheduler, False),
        (SortedScheduler, False),
        (PackedScheduler, False),
        (HistoPipeScheduler, False),
        (PacedScheduler, False),
        (HistoPipeScheduler, True),
    ],
)
def test_it_keeps_up_with_many_workers(scheduler, is_on_policy):
    small = work_of(scheduler, is_on_policy, num_prompts=32)
    large = work_of(scheduler, is_on_policy, num_prompts=256)
    assert large.plan < 1.1 * small.plan
    assert large.plan < 600
    assert large.decision < 1.1 * small.decision
    assert large.decision < 80


@dataclass(frozen=True, kw_only=True)
class Work:
    """Bytecodes a request."""

    plan: float
    decision: float


def work_of(make, is_on_policy: bool, *, num_prompts: int) -> Work:
    """The work of a plan for a worker to every other prompt, and of a decision half-way."""
    scheduler, num_workers, first = make(), num_prompts // 2, requests(0, num_prompts)
    of_length = lengths(len(first))
    make_plan(scheduler, first, num_workers=num_workers, step=0)
    scheduler.learn([answered(request, int(n)) for request, n in zip(first, of_length, strict=True)])
    scheduler = on_policy(scheduler) if is_on_policy else scheduler
    fresh, plans = requests(1, num_prompts), list[SharedPlan]()
    plan = bytecodes(lambda: plans.append(make_plan(scheduler, fresh, num_workers=num_workers, step=1)))
    decision = decision_of(scheduler, fresh, plans[0], of_length)
    return Work(plan=plan / len(fresh), decision=decision / len(fresh))


def decision_of(scheduler, fresh, plan, of_length) -> int:
    """Bytecodes of a decision half-way, when each is asked what moves."""
    now = 0.0
    work = StepRequests(step=1, requests=fresh)
    coordinator = Coordinator(scheduler, work, plan, keeps=True, every=0.5, clock=lambda: now)
    so_far = int(np.median(of_length))
    now, over = 1.0, of_length <= so_far
    report = ProgressReport(
        finished=np.flatnonzero(over).tolist(), tokens=dict.fromkeys(np.flatnonzero(~over).tolist(), so_far)
    )
    return bytecodes(lambda: coordinator.decide([(0, report)]))
