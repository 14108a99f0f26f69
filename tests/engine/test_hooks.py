"""Errors in a user's drafter, budget or scheduler are told with its class and line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from rhymerl.backends.embedded import EmbeddedBackend
from rhymerl.budgets import FixedBudget
from rhymerl.drafters import NoDrafter
from rhymerl.drafters.base import Drafter
from rhymerl.drafters.run_ahead import RunAheadDrafter
from rhymerl.drafts import Draft, DraftBatch
from rhymerl.engine.protocol import DraftingProtocol
from rhymerl.errors import HookError
from rhymerl.rewards import RewardScorer
from rhymerl.rollout import RolloutLoop, RolloutSettings
from rhymerl.schedulers import FIFOScheduler, Scheduler
from rhymerl.testing import make_prompt, tiny_policy
from rhymerl.types import RolloutRequest

NAME = __name__


class Raising(Drafter):
    def __init__(self, hook: str) -> None:
        self.hook = hook

    def propose(self, request: Any, context: Any, budget: int) -> Draft:
        self.look("propose")
        return Draft(token_ids=[3], parents=[-1])

    def catch_up(self) -> None:
        self.look("catch_up")

    def start(self, request: Any) -> None:
        self.look("start")

    def accept(self, request: Any, token_ids: Any, num_accepted: int) -> None:
        self.look("accept")

    def finish(self, completion: Any) -> None:
        self.look("finish")

    def learn(self, samples: Any) -> None:
        self.look("learn")

    def follow(self, delta: Any) -> None:
        self.look("follow")

    def look(self, hook: str) -> None:
        if hook == self.hook:
            {}["table"]  # type: ignore[index]


class Lists(Drafter):
    def propose(self, request: Any, context: Any, budget: int) -> Any:
        return [1, 2, 3]


class Batches(Drafter):
    def propose(self, request: Any, context: Any, budget: int) -> Any:
        raise AssertionError

    def propose_batch(self, requests: Any, contexts: Any, budgets: Any) -> Any:
        return [[1]] * len(requests)


class Backwards(Drafter):
    def propose(self, request: Any, context: Any, budget: int) -> Draft:
        return Draft(token_ids=[3], parents=[5])


class Stingy(FixedBudget):
    def limits(self, requests: Any) -> Any:
        raise KeyError("purse")


class Planner(FIFOScheduler):
    def __init__(self, plan: Any = None) -> None:
        self.made = plan

    def plan(self, requests: Sequence[RolloutRequest], num_workers: int, step: int) -> Any:
        if isinstance(self.made, Exception):
            raise self.made
        return self.made


class Learner(FIFOScheduler):
    def learn(self, samples: Any) -> None:
        raise ZeroDivisionError("no samples")


def run(drafter: Drafter, *, scheduler: Scheduler | None = None, budget: Any = None, checks: bool = False) -> Any:
    policy = tiny_policy()
    with EmbeddedBackend(check_drafts=checks) as backend, RewardScorer([]) as scorer:
        backend.start(policy, drafter, budget=budget or FixedBudget(nodes=4))
        loop = RolloutLoop(backend, scheduler or FIFOScheduler(), scorer=scorer, decode=str)
        loop.sync_weights([], 0)
        return loop.run([make_prompt([3, 4])], 0, RolloutSettings(group_size=2, max_tokens=6)).metrics


@pytest.mark.parametrize("hook", ["propose", "start", "accept", "finish", "learn", "follow"])
@pytest.mark.parametrize("runs_ahead", [False, True])
def test_a_drafter_that_raises(hook: str, runs_ahead: bool) -> None:
    drafter = Raising(hook)
    words = rf"^drafter={NAME}.Raising: look raised KeyError: 'table' \(test_hooks.py:\d+\)$"
    with pytest.raises(HookError, match=words) as caught:
        run(RunAheadDrafter(drafter) if runs_ahead else drafter)
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_drafter_that_raises_when_its_drafts_are_launched() -> None:
    """Only engines whose passes run elsewhere tell it so."""
    words = rf"^drafter={NAME}.Raising: look raised KeyError: 'table' "
    with pytest.raises(HookError, match=words):
        DraftingProtocol(Raising("catch_up"), FixedBudget(), vocabulary=9).catch_up()
    run(Raising("catch_up"))


def test_a_budget_that_raises() -> None:
    with pytest.raises(
        HookError, match=rf"^budget={NAME}.Stingy: limits raised KeyError: 'purse' \(test_hooks.py:\d+\)$"
    ):
        run(Backwards(), budget=Stingy(nodes=4))


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (None, r"Planner.plan returned None: expected a list with a list of requests for each worker \(test_hooks.py:"),
        ([None], r"Planner.plan returned \[None\]: expected a list with a list of requests"),
        (["ab"], r"Planner.plan returned \['ab'\]: expected a list with a list of requests"),
        ([[1]], r"Planner.plan returned a queue with 1 in it: expected the requests it was given \(test_hooks.py:"),
        ([[]], r"Planner.plan drops the request '.*' \(2 such\) \(test_hooks.py:\d+\)$"),
        (KeyError("x"), rf"^scheduler={NAME}.Planner: plan raised KeyError: 'x' \(test_hooks.py:\d+\)$"),
    ],
)
def test_a_scheduler_that_makes_no_plan(plan: Any, words: str) -> None:
    with pytest.raises(HookError, match=words):
        run(NoDrafter(), scheduler=Planner(plan))


def test_a_scheduler_that_cannot_learn() -> None:
    with pytest.raises(HookError, match=rf"^scheduler={NAME}.Learner: learn raised ZeroDivisionError: no samples "):
        run(NoDrafter(), scheduler=Learner())


@pytest.mark.parametrize(
    ("drafter", "words"),
    [
        (Lists(), "Lists proposed a bad draft for request .*: a list; expected a rhymerl.Draft (test_hooks.py:"),
        (Batches(), "Batches proposed a bad batch of drafts: a list; expected a DraftBatch (test_hooks.py:"),
        (Backwards(), "Backwards proposed a bad draft for request .*: a parent that does not come before its child ("),
    ],
)
@pytest.mark.parametrize("runs_ahead", [False, True])
def test_a_malformed_draft_is_told_once(
    drafter: Drafter, words: str, runs_ahead: bool, caplog: pytest.LogCaptureFixture
) -> None:
    metrics = run(RunAheadDrafter(drafter) if runs_ahead else drafter)
    assert metrics["spec/bad_drafts"] > 2
    (told,) = caplog.messages
    first, _, last = words.partition(".*")
    assert told.startswith(first)
    assert last in told
    assert told.endswith("such drafts are left out, and from now on only counted, as spec/bad_drafts")
    with pytest.raises(HookError, match="proposed a bad"):
        run(drafter, checks=True)


def test_drafts_of_other_types_are_packed_as_nothing() -> None:
    drafts: list[Any] = [None, Draft(token_ids=[4], parents=[-1], match_length=2)]
    packed = DraftBatch.pack(drafts)
    assert packed.problems == {0: "a NoneType; expected a rhymerl.Draft"}
    assert packed.match_length.tolist() == [0, 2]
