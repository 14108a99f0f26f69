"""Workers apart from the ranks: when tokens are sampled, and by whom, changes nothing else."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from rhymerl.drafts import NOT_DRAFTED, DraftSource
from rhymerl.rewards import Reward, RewardScorer
from rhymerl.rollout import Rollout, RolloutLoop, RolloutSettings
from rhymerl.schedulers import FIFOScheduler
from rhymerl.testing import make_requests
from rhymerl.types import Completion, Output
from rhymerl.workers import base, coordinator
from rhymerl.workers.coordinator import StepRequests
from rhymerl.workers.messages import OutputDelta
from rhymerl.workers.step_in_flight import StepInFlight
from rhymerl.workers.versions import Versions
from tests.distributed.threads import run_ranks
from tests.products import pairs_first, values_first
from tests.rollout.ranked import (
    PACES,
    REWARD,
    SCHEDULERS,
    SETTINGS,
    Restless,
    answers,
    check_kept,
    length,
    prompts,
    run_step,
)
from tests.rollout.tokens import TokenBackend
from tests.workers.fleet import alone, fleet, run


@pytest.fixture(autouse=True)
def looks_often(monkeypatch):
    """The scheduler is asked for moves within these short steps."""
    monkeypatch.setattr(base, "REBALANCE_S", 0.005)
    monkeypatch.setattr(base, "REBALANCE_EXCHANGES", 1)


@pytest.mark.parametrize(("scheduler", "run_ahead", "lockstep"), pairs_first(SCHEDULERS, ["off", "draft"], PACES))
def test_workers_give_the_samples_that_one_process_gives(scheduler, run_ahead, lockstep):
    with fleet(scheduler, pass_s=0.0002, run_ahead=run_ahead, lockstep=lockstep) as (loop, _):
        for one, other in zip(alone(4), run(loop, range(4), update_s=0.01), strict=True):
            assert answers(one) == answers(other)
            assert [sample.reward for sample in one.samples] == [sample.reward for sample in other.samples]
            assert other.metrics["off_policy/staleness/max"] == 0


@pytest.mark.parametrize(("scheduler", "lockstep"), values_first(SCHEDULERS, PACES))
def test_kept_tokens_are_at_most_one_policy_old(scheduler, lockstep):
    with fleet(scheduler, pass_s=0.0004, run_ahead="keep", lockstep=lockstep) as (loop, _):
        steps = run(loop, range(6), update_s=0.01)
    stale = check_kept(steps)
    assert stale > 0, "nobody went on during the update"


def test_workers_that_have_had_little_to_do_since_the_step_before_were_idle():
    engines = [TokenBackend(length, pass_s=0.01) for _ in range(2)]
    with fleet(workers=2, make=engines.__getitem__) as (loop, _):
        run_step(loop, 0)
        for engine in engines:
            engine.pass_s = 0.0
        time.sleep(0.3)
        assert run_step(loop, 1).metrics["workers/idle_frac"] > 0.5


def update_until(loop: RolloutLoop, holds: Callable[[StepInFlight], bool]) -> None:
    """Be an update that lasts until that holds for the next step."""
    pool, ahead = loop.workers, loop.workers._next_step
    with pool.changed:
        pool.wait(60, lambda: holds(ahead))
        assert holds(ahead)


def is_answered(ahead: StepInFlight) -> bool:
    return not ahead.worker


def test_a_step_is_sampled_while_the_one_before_is_trained():
    with fleet(pass_s=0.001, run_ahead="keep", workers=2) as (loop, _):
        run_step(loop, 0)
        update_until(loop, is_answered)
        rollout = run_step(loop, 1)
        assert rollout.metrics["off_policy/staleness/mean"] == 1
        assert rollout.metrics["workers/idle_frac"] < 1


def test_workers_go_on_during_every_update():
    """Also where a step was answered as a whole while the one before was trained."""
    with fleet(pass_s=0.001, run_ahead="keep", workers=2) as (loop, _):
        run_step(loop, 0)
        for step in range(1, 4):
            update_until(loop, is_answered)
            rollout = run_step(loop, step)
            assert rollout.metrics["off_policy/staleness/mean"] == 1


@pytest.mark.parametrize("run_ahead", ["draft", "keep"])
def test_a_resumed_run_goes_on_from_what_workers_had_told(run_ahead):
    with fleet(pass_s=0.002, run_ahead=run_ahead) as (loop, _):
        first = run(loop, range(2))
        update_until(loop, lambda ahead: sum(map(len, ahead.outputs.values())) > 20)
        state = loop.state_dict()
    assert state["ahead"]["step"] == 2
    assert sum(len(each["token_ids"]) for each in state["ahead"]["outputs"].values()) > 20
    with fleet(pass_s=0.002, run_ahead=run_ahead, workers=2) as (loop, _):
        loop.load_state_dict(state)
        rest = run(loop, range(2, 4))
    if run_ahead == "keep":
        assert check_kept([*first, *rest]) > 0
    else:
        assert [answers(each) for each in (*first, *rest)] == [answers(each) for each in alone(4)]


def kept_for_step_2() -> dict[str, Any]:
    with fleet(pass_s=0.002, run_ahead="keep") as (loop, _):
        run(loop, range(2))
        update_until(loop, lambda ahead: sum(map(len, ahead.outputs.values())) > 20)
        return loop.state_dict()


@pytest.mark.parametrize("run_ahead", ["off", "draft"])
def test_what_was_kept_trains_nobody_who_keeps_nothing(run_ahead):
    state = kept_for_step_2()
    with fleet(pass_s=0.0002, run_ahead=run_ahead) as (loop, _):
        loop.load_state_dict(state)
        rollout = run_step(loop, 2)
    assert {version for each in rollout.samples for version in each.completion.output.policy_versions} == {2}
    assert answers(rollout) == answers(alone(3)[2])


def test_what_was_kept_under_other_settings_is_sampled_anew():
    state = kept_for_step_2()
    with fleet(run_ahead="keep") as (loop, _):
        loop.load_state_dict(state)
        loop.sync_weights([], 2)
        rollout = loop.run(prompts(2), 2, RolloutSettings(group_size=3, max_tokens=200, temperature=0.5))
    assert {version for each in rollout.samples for version in each.completion.output.policy_versions} == {2}


@pytest.mark.parametrize("lockstep", [False, True], ids=["free", "lockstep"])
def test_no_token_is_sampled_twice_however_often_its_request_moves(lockstep):
    engines: list[TokenBackend] = []

    def engine(number: int) -> TokenBackend:
        engines.append(TokenBackend(length, pass_s=0.002 * (1 + number)))
        return engines[-1]

    with fleet(Restless, make=engine, lockstep=lockstep) as (loop, _):
        rollout = run_step(loop, 0)
        assert loop.workers.num_moves >= 3
    assert sum(each.num_sampled for each in engines) == sum(map(len, rollout.samples))


def test_an_evaluation_comes_before_the_step_that_has_begun():
    with fleet(pass_s=0.001, run_ahead="keep") as (loop, _):
        run_step(loop, 0)
        loop.sync_weights([], 1)
        found = loop.run(prompts(0), "validation", SETTINGS, split="validation")
        assert found.metrics["off_policy/staleness/max"] == 0
        rollout = run_step(loop, 1)
        assert len(rollout.samples) == 12


def test_other_prompts_than_announced_are_answered_all_the_same():
    with fleet(pass_s=0.001, run_ahead="keep") as (loop, _):
        loop.sync_weights([], 0)
        loop.run(prompts(0), 0, SETTINGS, following=prompts(1))
        loop.sync_weights([], 1)
        rollout = loop.run(prompts(0), 1, SETTINGS, following=None)
        assert [s.prompt.id for s in rollout.samples] == [p.id for p in prompts(0) for _ in range(3)]


def test_other_ranks_get_the_samples_of_the_first():
    def work(ranks) -> list[Rollout]:
        with fleet(ranks=ranks, workers=3, run_ahead="draft", pass_s=0.0002) as (loop, backend):
            found = run(loop, range(3))
            assert bool(backend.connections) == (ranks.rank == 0)
            return found

    for each in run_ranks(2, work):
        assert [answers(step) for step in each] == [answers(step) for step in alone(3)]


def test_lockstep_repeats_bit_for_bit():
    def once() -> list[list[object]]:
        with fleet(run_ahead="keep", lockstep=True) as (loop, _):
            steps = run(loop, range(5), update_s=random.uniform(0, 0.02))
            return [[s.completion.output.policy_versions.tolist() for s in step.samples] for step in steps]

    assert once() == once()


def test_workers_are_refused_where_ranks_are_the_workers():
    with pytest.raises(
        ValueError, match=r"^workers=3: with TokenBackend every rank is a worker; expected null, 1, or backend=ray"
    ):
        RolloutLoop(TokenBackend(length), FIFOScheduler(), scorer=RewardScorer([REWARD]), decode=str, num_workers=3)


def test_spans_tell_what_workers_did_also_during_the_update():
    with fleet(pass_s=0.002, run_ahead="draft") as (loop, _):
        steps = run(loop, range(4), update_s=0.05)
    decoding = [span for each in steps for span in each.spans if span.activity == "decode"]
    assert {span.worker for span in decoding} == {0, 1, 2}
    assert {span.number for span in decoding} >= {0, 1, 2, 3}
    assert {span.number for each in steps for span in each.spans if span.activity == "weights"} >= {0, 1, 2}
    ahead = [span for step, each in enumerate(steps[:-1]) for span in each.spans if span.number == step + 1]
    assert ahead, "nobody went on during the update"
    assert len({(span.worker, span.start_s) for span in decoding}) == len(decoding), "none is told twice"


@pytest.mark.parametrize("run_ahead", ["draft", "keep"])
def test_further_rounds_of_a_step_leave_the_next_one_as_far_as_it_is(run_ahead):
    """Half of the groups teach nothing and are replaced, in two rounds; no step is planned twice."""
    equal = Reward(lambda completion: 1.0, name="equal", where="main")
    settings = RolloutSettings(group_size=3, max_tokens=200, dynamic_sampling=2)
    planned: list[int | str] = []

    class Noting(FIFOScheduler):
        def plan(self, requests, num_workers, step):
            planned.append(step)
            return super().plan(requests, num_workers, step)

    with fleet(Noting, pass_s=0.0005, run_ahead=run_ahead, scorer=RewardScorer([equal])) as (loop, _):
        for step in range(3):
            loop.sync_weights([], step)
            others = iter(prompts(step + 1)[:4])
            found = loop.run(
                prompts(step), step, settings, epoch=step, following=prompts(step + 1), replacements=others
            )
            assert found.metrics["workers/up"] == 3, "a gauge, which is not added up over rounds"
            assert found.metrics["rollout/replaced_groups"] == 1
            assert loop.workers.state().step == step + 1
            assert next(others, None) is None
    assert sorted(planned) == [0, 0, 1, 1, 2, 2, 3]


class Telling(TokenBackend):
    """Says that each prefetched token was right."""

    def _completion(self, name: str, reason: Any) -> Completion:
        completion = super()._completion(name, reason)
        prefetched, output = completion.request.prefetched, completion.output
        num_right = 0 if prefetched is None else len(prefetched)
        sources = np.where(np.arange(len(output)) < num_right, DraftSource.RUN_AHEAD, NOT_DRAFTED)
        return replace(completion, output=replace(output, sources=sources.astype(np.int8)))


def test_after_further_rounds_auto_still_sees_what_drafts_bring():
    """All groups teach nothing and are replaced, in two rounds, before each step that was begun ahead."""
    equal = Reward(lambda completion: 1.0, name="equal", where="main")
    settings = RolloutSettings(group_size=3, max_tokens=200, dynamic_sampling=2)
    shares = []
    with fleet(make=lambda number: Telling(length, pass_s=0.0005), run_ahead="auto", scorer=RewardScorer([equal])) as (
        loop,
        _,
    ):
        for step in range(4):
            loop.sync_weights([], step)
            run = partial(loop.run, prompts(step), step, settings, epoch=step, following=prompts(step + 1))
            first = run(replacements=iter([*prompts(step + 1), *prompts(step + 2)]))
            shares.append(loop._rule.state_dict()["share"])
            assert first.metrics["rollout/replaced_groups"] == 2
            assert loop.workers.state().step == step + 1, "drafts are worth it, so the next step is begun"
            update_until(loop, lambda ahead: sum(map(len, ahead.outputs.values())) > 100)
    assert shares[0] == 1, "nothing was begun ahead yet"
    assert min(shares[1:]) > 0.02


def test_a_step_knows_how_many_of_its_episodes_wait_as_far_as_it_is_told():
    requests = make_requests(3)
    plan = coordinator.make_plan(FIFOScheduler(), requests, num_workers=1, step=0)
    work = StepRequests(step=0, requests=requests)
    step = StepInFlight(work=work, plan=plan, versions=Versions(oldest=0, final=0))
    reasons: list[Any] = ["turn", "withdrawn", "stop"]
    for request, reason in zip(requests, reasons, strict=True):
        step.extend(OutputDelta(id=request.id, start=0, output=Output.of([1], finish_reason=reason)))
    assert step.num_waiting == 1
    step.extend(OutputDelta(id=requests[0].id, start=1, output=Output.of([2])))  # the reply
    assert step.num_waiting == 0
