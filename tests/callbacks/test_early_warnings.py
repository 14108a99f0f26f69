"""Each rule warns of what it is for, and of nothing else."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rhymerl.algos import GRPO
from rhymerl.backends.spans import EVALUATION, WorkerSpan
from rhymerl.callbacks import EarlyWarnings
from rhymerl.callbacks.early_warnings import (
    RULES,
    WINDOW,
    Recent,
    Rule,
    acceptance_falls,
    all_rewards_alike,
    calls_fail,
    idle_of,
    kl_grows,
    leaves_one,
    most_rewards_alike,
    one_token_left,
    replies_awaited,
    truncation,
    workers_idle,
)
from rhymerl.rollout import Rollout
from rhymerl.testing import tiny_policy
from tests.callbacks.test_histograms import answer
from tests.engine.test_grid import sample
from tests.training.test_replay import sampled

ACCEPTED, BUBBLES, CLIPPED, EQUAL, KL = (
    *("rollout/spec_accept_length", "rollout/bubble_frac", "completions/clipped_ratio"),
    *("frac_reward_zero_std", "kl"),
)
WAITS = "environment/idle_frac"
RATE, HITS, NODES = "rollout/spec_accept_rate", "spec/draft_hit_rate", "budget/nodes_per_pass"
FINE = {ACCEPTED: [1.5] * 30, BUBBLES: [0.1] * 30, CLIPPED: [0.05] * 30, EQUAL: [0.3] * 30, KL: [0.01] * 30}
FINE |= {RATE: [0.8] * 30, HITS: [1.0] * 30, NODES: [200.0] * 30}
FALLS = [*[1.2] * 5, *[2.0] * 8, *[1.4] * 5]  # tokens a pass


def recent(
    *, equal: Sequence[str | None] = (None,) * WINDOW, idle: dict[int, float] | None = None, **changed: Any
) -> Recent:
    metrics = {**FINE, **changed.pop("metrics", {})}
    return Recent(metrics=metrics, equal_rewards=equal, idle=idle if idle is not None else {0: 0.1, 1: 0.5}, **changed)


def after(steady: float, *last: float) -> list[float]:
    return [*[steady] * 20, *last]


CASES = [
    (
        truncation,
        {"metrics": {CLIPPED: after(0.1, *[0.25] * 5)}},
        "25% of the answers are cut off at rollout.max_tokens",
    ),
    (most_rewards_alike, {"metrics": {EQUAL: after(0.5, *[0.95] * 5)}}, "the same reward for 95% of the prompts"),
    (
        kl_grows,
        {"metrics": {KL: [*[0.06] * 10, *[0.1] * 5, *[0.2] * 5]}},
        "kl is 0.2 nats a token, 3.3 times what it was 10",
    ),
    (
        acceptance_falls,
        {"metrics": {ACCEPTED: FALLS, RATE: [*[0.8] * 13, *[0.6] * 5], HITS: [1.0] * 18, NODES: [9.0] * 18}},
        "acceptance length fell from 2.00 to 1.40, and the share of drafts that is right from 80% to 60%: answers repeat",
    ),
    (
        acceptance_falls,
        {"metrics": {ACCEPTED: FALLS, RATE: [0.8] * 18, HITS: [*[0.9] * 13, *[0.3] * 5], NODES: [9.0] * 18}},
        "from 72% to 24%",
    ),
    (
        acceptance_falls,
        {"metrics": {ACCEPTED: FALLS, RATE: [*[0.8] * 13, *[0.0] * 5], HITS: [*[1.0] * 13, *[0.0] * 5], NODES: []}},
        "from 80% to 0%",
    ),
    (
        acceptance_falls,
        {"metrics": {ACCEPTED: FALLS, RATE: [*[0.8] * 13, *[0.6] * 5], HITS: [], NODES: []}},
        "from 80% to 60%",
    ),
    (workers_idle, {"metrics": {BUBBLES: after(0.1, *[0.4] * 5)}}, "worker 1 in 50% of the latest"),
    (
        workers_idle,
        {"metrics": {BUBBLES: after(0.1, *[0.4] * 5)}, "idle": {0: 0.0, 1: 0.1}},
        "40% of the time of rollouts. s",
    ),
    # Of ten minutes workers decode 6 and wait 2.2 for replies alone; then they decode 6 and wait 1.8.
    (
        replies_awaited,
        {"metrics": {BUBBLES: after(0.1, *[0.4] * 5), WAITS: after(0.1, *[2.2 / 8.2] * 5)}},
        "40% of the time of rollouts, mostly because environments had not replied",
    ),
    (replies_awaited, {"metrics": {BUBBLES: [0.9] * 30, WAITS: [0.9] * 30}, "idle": {0: 0.9}}, "is_pure"),
    (workers_idle, {"metrics": {BUBBLES: after(0.1, *[0.4] * 5), WAITS: after(0.1, *[1.8 / 7.8] * 5)}}, "worker 1"),
    (
        truncation,
        {"metrics": {CLIPPED: after(0.1, *[0.5] * 5)}, "algo": GRPO(mask_truncated=True)},
        "cut off at rollout.max_tokens. Raise it; where answers ramble, algo.overlong_fraction=0.2 makes those near the limit worth less",
    ),
    (
        truncation,
        {"metrics": {CLIPPED: after(0.1, *[0.5] * 5)}, "algo": GRPO(mask_truncated=True, overlong_fraction=0.1)},
        "50% of the answers are cut off at rollout.max_tokens. Raise it",
    ),
    (
        truncation,
        {"metrics": {CLIPPED: after(0.1, *[1.0] * 5)}, "has_stop": False},
        "No stop token is known: set rollout.stop_token_ids",
    ),
    (
        truncation,
        {"metrics": {CLIPPED: [1.0], EQUAL: [1.0]}, "left_out": [True], "equal": ["all alike"]},
        "all answers are cut off at rollout.max_tokens and left out of the loss, so nothing is learned: raise it",
    ),
    (
        truncation,
        {"metrics": {CLIPPED: after(0.1, *[0.9] * 5), "episodes/length_frac": after(0.1, *[0.3] * 5)}},
        "30% of the answers are cut off at rollout.max_tokens",
    ),
    (calls_fail, {"failing": ["rewards.bad failed"]}, "rewards.bad failed"),
    (
        calls_fail,
        {"failing": ["rewards.bad failed"], "metrics": {EQUAL: [1.0]}, "equal": ["all alike"]},
        "rewards.bad failed",
    ),
    (calls_fail, {"failing": ["rewards.bad failed"], "metrics": {EQUAL: after(0.5, *[0.95] * 5)}}, "rewards.bad"),
    (all_rewards_alike, {"metrics": {EQUAL: [1.0]}, "equal": ["all alike"]}, "all alike, so nothing is learned"),
    (all_rewards_alike, {"metrics": {EQUAL: [1.0] * 9}, "equal": ["all alike"] * WINDOW}, "all alike, so nothing"),
]


@pytest.mark.parametrize(("rule", "changed", "words"), CASES)
def test_a_rule_warns_and_no_other_does(rule: Rule, changed: dict[str, Any], words: str) -> None:
    found = {each: each(recent(**changed)) for each in RULES}
    assert words in (found.pop(rule) or "")
    assert set(found.values()) == {None}


SILENT = {
    "episodes end at another limit": {"metrics": {CLIPPED: [0.9] * 30, "episodes/length_frac": [0.1] * 30}},
    "all is well": {},
    "a metric that a run has not": {"metrics": {name: [] for name in FINE} | {EQUAL: [0.3] * 30}},
    "the run is short": {"metrics": {name: [1.0] * (WINDOW - 1) for name in FINE}},
    "one step only": {"metrics": {CLIPPED: after(0.1, 0.6), EQUAL: after(0.5, 1.0), BUBBLES: after(0.1, 0.8)}},
    "one step whose rewards are alike": {"equal": [*[None] * (WINDOW - 1), "all alike"]},
    "a large kl that stays": {"metrics": {KL: [0.3] * 30}},
    "a small kl that grows": {"metrics": {KL: np.geomspace(1e-4, 0.09, 30).tolist()}},
    "acceptance that rises": {"metrics": {ACCEPTED: np.linspace(1, 3, 30).tolist()}},
    "drafts as good as before, for which the budget asks less often": {
        "metrics": {
            ACCEPTED: FALLS,
            RATE: [*[0.8] * 13, *[0.78] * 5],
            HITS: [1.0] * 18,
            NODES: [*[300.0] * 13, *[1.0] * 5],
        }
    },
    "drafts that are not asked for in some steps, and hardly in another": {
        "metrics": {
            ACCEPTED: FALLS,
            RATE: [*[0.8] * 14, 0.0, 0.0, 0.2, 0.8],
            HITS: [*[1.0] * 14, 0.0, 0.0, 1.0, 1.0],
            NODES: [*[300.0] * 14, 0.0, 0.0, 0.1, 1.0],
        }
    },
    "drafts that are not asked for at all": {
        "metrics": {
            ACCEPTED: FALLS,
            RATE: [*[0.8] * 13, *[0.0] * 5],
            HITS: [*[1.0] * 13, *[0.0] * 5],
            NODES: [*[9.0] * 13, *[0.0] * 5],
        }
    },
    "drafts that never added much": {"metrics": {ACCEPTED: after(1.15, *[1.0] * 5)}},
    "workers that start in the first step": {"metrics": {BUBBLES: [0.96, *[0.2] * 4]}},
    "one worker, which waits for rewards": {"metrics": {BUBBLES: [0.9] * 30}, "idle": {0: 0.9}},
}


@pytest.mark.parametrize("name", SILENT)
def test_nothing_is_said_where(name: str) -> None:
    assert [rule(recent(**SILENT[name])) for rule in RULES] == [None] * len(RULES)  # type: ignore[arg-type]


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_running_ahead_is_no_advice_for_a_run_that_does(runs_ahead: bool) -> None:
    idle = {BUBBLES: after(0.1, *[0.4] * 5)}
    for found in (
        workers_idle(recent(metrics=idle, runs_ahead=runs_ahead)),
        replies_awaited(recent(metrics={**idle, WAITS: [0.5] * 30}, runs_ahead=runs_ahead)),
    ):
        assert found is not None
        assert ("run_ahead=auto" in found) is not runs_ahead


def test_a_warning_comes_back_after_so_many_steps_only(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    callback = EarlyWarnings(every_n_steps=8)
    rollout = Rollout(samples=[answer([])], metrics={"timing_s/rollout": 1.0})
    told, holding = [], []
    for step in range(1, 31):
        metrics = {name: torch.tensor(0.5 if step < 25 else 0.0) for name in (CLIPPED, EQUAL)}
        trainer = SimpleNamespace(is_global_zero=True, callback_metrics=metrics)
        module = SimpleNamespace(
            last_rollout=rollout,
            num_rollouts=step,
            advantages=None,
            run_ahead="off",
            algo=GRPO(),
            policy=SimpleNamespace(stop_token_ids=(1,)),
            rollout=None,
        )
        callback.on_train_batch_end(trainer, module, None, None, 0)  # type: ignore[arg-type]
        told += [step] if callback.latest else []
        holding += [step] if callback.holding else []
    assert told == [5, 13, 21]
    assert holding == list(range(5, 27)), "as long as the mean of five steps is as high"
    assert [message.partition(":")[0] for message in caplog.messages] == ["step 5", "step 13", "step 21"]


@pytest.mark.parametrize(
    ("left", "is_one"), [({"top_k": 1}, True), ({"top_p": 1e-9}, True), ({"top_k": 2}, False), ({}, False)]
)
def test_truncation_that_leaves_one_token_is_warned_of(left: dict[str, Any], is_one: bool) -> None:
    samples = [sample(completion) for completion in sampled(tiny_policy(), count=3, **left).values()]
    assert leaves_one(samples) is is_one
    found = one_token_left(recent(metrics={}, leaves_one=is_one))
    assert ("so nothing is learned" in (found or "")) is is_one


def test_a_worker_is_idle_where_it_does_not_decode_for_training() -> None:
    spans = [
        WorkerSpan(worker=worker, activity=activity, number=number, start_s=0.0, end_s=seconds)  # type: ignore[arg-type]
        for worker, activity, number, seconds in [
            (0, "decode", 3, 2.0),
            (0, "decode", 4, 1.0),
            (0, "decode", EVALUATION, 9.0),
            (1, "weights", 3, 1.0),
        ]
    ]
    rollout = Rollout(samples=[], metrics={"timing_s/rollout": 4.0}, spans=spans)
    assert idle_of(rollout) == {0: 0.25, 1: 1.0}
