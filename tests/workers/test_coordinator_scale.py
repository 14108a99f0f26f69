"""A thousand workers and sixteen thousand requests: what the coordinator of a step takes."""

from __future__ import annotations

import time

import numpy as np
import pytest

from rhymerl.rollout.base import RolloutSettings, requests_of
from rhymerl.schedulers import FIFOScheduler, HistoPipeScheduler, PacedScheduler, PackedScheduler, SortedScheduler
from rhymerl.schedulers.on_policy import on_policy
from rhymerl.testing import make_prompt
from rhymerl.types import Completion, Output, RolloutRequest, Sample
from rhymerl.workers.coordinator import Coordinator, ProgressReport, make_plan

WORKERS = 1_024
PROMPTS = [make_prompt([3, number % 997, number // 997], id=str(number)) for number in range(2_048)]
SETTINGS = RolloutSettings(group_size=8, max_tokens=16_384)
PLAN_S, REBALANCE_S = 0.5, 0.05


def requests(step: int) -> list[RolloutRequest]:
    return requests_of(PROMPTS, step, SETTINGS, seed=0, stop_token_ids=[1], split="train", round_number=0)


def lengths(number: int) -> np.ndarray:
    """Long-tailed, and mostly the prompt's own."""
    draw = np.random.default_rng(0)
    own = np.repeat(draw.lognormal(7, 1, number // SETTINGS.group_size), SETTINGS.group_size)
    return np.minimum(own * draw.lognormal(0, 0.5, number), SETTINGS.max_tokens).astype(int) + 1


def answered(request: RolloutRequest, length: int) -> Sample:
    output = Output(
        token_ids=np.zeros(length, np.int32),
        logprobs=np.zeros(length),
        policy_versions=np.zeros(length, np.int32),
        finish_reason="stop",
    )
    completion = Completion(request=request, output=output)
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
def test_it_keeps_up_with_a_thousand_workers(scheduler, is_on_policy):
    scheduler, first = scheduler(), requests(0)
    of_length = lengths(len(first))
    make_plan(scheduler, first, num_workers=WORKERS, step=0)
    scheduler.learn([answered(request, int(n)) for request, n in zip(first, of_length, strict=True)])
    scheduler = on_policy(scheduler) if is_on_policy else scheduler
    planned, decided = [], []
    for step in (1, 2, 3):
        fresh, started = requests(step), time.perf_counter()
        plan = make_plan(scheduler, fresh, num_workers=WORKERS, step=step)
        planned.append(time.perf_counter() - started)
        decided.append(decision_s(scheduler, fresh, plan, of_length, step))
    assert min(planned) <= PLAN_S
    assert min(decided) <= REBALANCE_S


def decision_s(scheduler, fresh, plan, of_length, step) -> float:
    """Seconds of a decision half-way, when each is asked what moves."""
    now = 0.0
    coordinator = Coordinator(
        scheduler, fresh, plan, step=step, following=None, keeps=True, every=0.5, clock=lambda: now
    )
    so_far = int(np.median(of_length))
    now, over = 1.0, of_length <= so_far
    report = ProgressReport(
        finished=np.flatnonzero(over).tolist(), tokens=dict.fromkeys(np.flatnonzero(~over).tolist(), so_far)
    )
    started = time.perf_counter()
    coordinator.decide([(0, report)])
    return time.perf_counter() - started
