"""Rollouts over several ranks: scheduler, run-ahead and ranks' pace change only when tokens are sampled."""

from __future__ import annotations

import threading
import time
from collections import Counter

import numpy as np
import pytest

from rhymerl.distributed import Alone
from rhymerl.distributed.store_channel import StoreChannel
from rhymerl.rewards import Reward, RewardScorer
from rhymerl.rollout import Rollout, RolloutSettings
from rhymerl.testing import make_prompt
from tests.distributed.threads import Threads, run_ranks
from tests.products import pairs_first, values_first
from tests.rollout.ranked import (
    PACES,
    PROMPTS,
    SCHEDULERS,
    SETTINGS,
    Ranked,
    Restless,
    answers,
    check_kept,
    length,
    prompts,
    run_step,
)
from tests.rollout.tokens import TokenBackend, expected


@pytest.mark.parametrize(
    ("scheduler", "run_ahead", "lockstep"), pairs_first(SCHEDULERS, ["off", "draft", "auto"], PACES)
)
def test_every_rank_gets_the_samples_that_one_process_draws(scheduler, run_ahead, lockstep):
    alone = Ranked(size=1).run(4)[0]
    ranked = Ranked(scheduler, pass_s=0.0002, run_ahead=run_ahead, lockstep=lockstep).run(4)
    for rank in range(3):
        for one, other in zip(alone, ranked[rank], strict=True):
            assert answers(one) == answers(other)
            assert [sample.reward for sample in one.samples] == [sample.reward for sample in other.samples]
            assert one.metrics["reward"] == other.metrics["reward"]
            assert other.metrics["off_policy/staleness/max"] == 0


@pytest.mark.parametrize(("scheduler", "lockstep"), values_first(SCHEDULERS, PACES))
def test_kept_tokens_are_those_of_the_policy_that_drew_them_at_most_one_update_ago(scheduler, lockstep):
    steps = Ranked(scheduler, pass_s=0.0004, run_ahead="keep", lockstep=lockstep).run(6)[0]
    assert check_kept(steps) > 0, "nobody ran ahead"
    for sample in (sample for rollout in steps for sample in rollout.samples):
        assert (np.diff(sample.completion.output.policy_versions) >= 0).all()
        assert sample.completion.logprobs.tolist() == [-float(token) for token in sample.completion.token_ids]
        assert sample.completion.num_passes == len(sample)


def test_what_auto_goes_by_is_in_the_state_and_a_loop_goes_on_from_it():
    ranked = Ranked(run_ahead="auto")
    ranked.run(3)
    states = [dict(state, rule={"share": 0.0, "num_waits": 2, "is_ahead": False}) for state in ranked.states]
    ranked.run(3, states=states, first=3)
    assert [state["rule"] for state in ranked.states] == [{"share": 0.0, "num_waits": 5, "is_ahead": False}] * 3
    assert all(state["ahead"] is None for state in ranked.states)  # nobody has begun the step to come


def test_moved_requests_go_on_where_they_were_and_are_counted():
    steps = Ranked(Restless, pass_s=0.02).run(2)[0]
    assert any(rollout.metrics["sched/migration_rate"] > 0 for rollout in steps)
    for rollout in steps:
        for sample in rollout.samples:
            assert sample.completion.num_passes == len(sample)
            assert sample.completion.token_ids.tolist() == expected(sample.completion)


@pytest.mark.parametrize("lockstep", [False, True])
def test_a_moved_request_takes_its_tokens_along(lockstep):
    """One that began again on its new worker would have the same answer, of more passes in all."""
    backends = [TokenBackend(lambda request: 5 * length(request), pass_s=0.007) for _ in range(3)]
    ranked = Ranked(Restless, lockstep=lockstep)
    (rollout, *_) = run_ranks(3, lambda ranks: run_step(ranked.loop(ranks, backends[ranks.rank]), 0))
    assert rollout.metrics["sched/migration_rate"] > 0
    assert sum(backend.num_sampled for backend in backends) == sum(len(sample) for sample in rollout.samples)


@pytest.mark.parametrize("run_ahead", ["off", "draft", "auto"])
def test_what_a_run_had_kept_is_sampled_anew_by_one_that_keeps_nothing(run_ahead):
    before = Ranked(pass_s=0.0004, run_ahead="keep")
    before.run(3)
    assert before.states[0]["ahead"]["outputs"], "nobody ran ahead"
    (rollout,) = Ranked(run_ahead=run_ahead).run(1, states=[before.states[0]], first=3)[0]
    for sample in rollout.samples:
        assert set(sample.completion.output.policy_versions.tolist()) == {3}
        assert sample.completion.token_ids.tolist() == expected(sample.completion)


def test_in_lockstep_nothing_follows_the_clock():
    def passes(pass_s: float) -> list[list[float]]:
        ranked = Ranked(Restless, pass_s=pass_s, run_ahead="keep", lockstep=True).run(4)
        versions = [s.completion.output.policy_versions.tolist() for r in ranked[0] for s in r.samples]
        return [[rollout.metrics["passes"] for rollout in ranked[0]], versions]

    assert passes(0.0) == passes(0.002)


@pytest.mark.parametrize("size", [3, 2, 1], ids=["as many ranks", "fewer ranks", "one rank"])
def test_what_was_prefetched_survives_a_checkpoint(size):
    before = Ranked(pass_s=0.0004, run_ahead="keep")
    before.run(3)
    state = before.states[0]
    assert state["ahead"]["outputs"], "nobody ran ahead"
    after = Ranked(size=size, run_ahead="keep").run(2, states=[state], first=3)[0]
    sampled = state["ahead"]["outputs"]
    for sample in after[0].samples:
        completion = sample.completion
        assert completion.token_ids.tolist() == expected(completion)
        if completion.request.id in sampled:
            kept = sampled[completion.request.id]["token_ids"].tolist()
            assert completion.token_ids.tolist()[: len(kept)] == kept
            assert completion.output.policy_versions.tolist()[: len(kept)] == [2] * len(kept)


def test_a_validation_in_between_leaves_what_was_prefetched_alone():
    def work(ranks: Threads) -> list[Rollout]:
        loop = Ranked(pass_s=0.0004, run_ahead="keep").loop(ranks)
        found = []
        for step in range(4):
            found.append(run_step(loop, step))
            loop.sync_weights([], step + 1)
            loop.run(PROMPTS, "evaluation", SETTINGS, split="validation")
        return found

    for step, rollout in enumerate(run_ranks(3, work)[0]):
        assert len(rollout.samples) == 12
        for sample in rollout.samples:
            assert sample.completion.token_ids.tolist() == expected(sample.completion)
            assert set(sample.completion.output.policy_versions.tolist()) <= {step - 1, step}


def test_more_ranks_than_samples():
    def work(ranks: Threads) -> Rollout:
        loop = Ranked(run_ahead="draft").loop(ranks)
        return loop.run(PROMPTS[:1], 0, RolloutSettings(group_size=2), following=PROMPTS[1:2])

    for rollout in run_ranks(4, work):
        assert [sample.completion.request.id for sample in rollout.samples] == ["0/0/0", "0/0/1"]


def test_ranks_that_wait_do_not_spin(monkeypatch):
    """A rank with nothing to do sleeps before it looks for messages again."""
    looks, naps, thread = Counter[tuple[int, bool]](), Counter[int](), dict[int, int]()
    exchange, sleep = StoreChannel.exchange, time.sleep

    def noted_exchange(channel, *given, waits):
        looks[channel._rank, waits] += 1
        return exchange(channel, *given, waits=waits)

    def noted_sleep(seconds):
        naps[threading.get_ident()] += seconds > 0
        sleep(seconds)

    monkeypatch.setattr(StoreChannel, "exchange", noted_exchange)
    monkeypatch.setattr(time, "sleep", noted_sleep)

    def work(ranks: Threads) -> None:
        thread[ranks.rank] = threading.get_ident()
        Ranked(pass_s=0.02 * (ranks.rank == 0)).loop(ranks).run(PROMPTS, 0, SETTINGS)

    run_ranks(2, work)
    assert looks[1, True] > 5, "it waits while the other one works"
    assert naps[thread[1]] >= looks[1, True] - 2  # but for the last command, say
    assert looks[1, False] <= 3 * len(PROMPTS), "one after each answer at most"


def test_groups_that_teach_nothing_are_replaced_and_ranks_agree():
    """Odd prompts teach nothing: their rewards are all 1."""

    def reward(completion: str, *, number: int) -> float:
        return 1.0 if number % 2 else float(sum(map(int, completion.split())))

    prompts = [make_prompt([3, number], id=str(number), number=number) for number in range(12)]
    settings = RolloutSettings(group_size=3, max_tokens=200, dynamic_sampling=2)

    def work(ranks: Threads) -> tuple[Rollout, int, float]:
        loop = Ranked(run_ahead="keep", pass_s=0.0002).loop(ranks)
        loop.scorer = RewardScorer([Reward(reward, name="reward", where="main")])
        stream = iter(prompts[4:12])
        rollout = loop.run(prompts[:4], 0, settings, following=prompts[:4], replacements=stream)
        ahead = loop.workers.state()
        assert ahead is None or ahead.step == 1
        return rollout, loop.history.num_answers, len(list(stream))

    found = run_ranks(3, work)
    for rollout, num_answers, left in found:
        # 1 and 3 are replaced by 4; of 5, which teaches nothing, the place is 6's in the second round.
        groups = list(dict.fromkeys(sample.prompt.id for sample in rollout.samples))
        assert groups == ["0", "4", "2", "6"]
        assert len(rollout.samples) == 12
        assert rollout.metrics["rollout/replaced_groups"] == 3 / 4
        assert num_answers == 3 * 7
        assert left == 5
        assert answers(rollout) == answers(found[0][0])


def test_replacements_end_with_the_bound_and_with_the_prompts():
    settings = RolloutSettings(group_size=2, dynamic_sampling=3)
    equal = [Reward(lambda completion: 1.0, name="equal", where="main")]

    def groups(num_others: int) -> list[str]:
        loop = Ranked(size=1).loop(Alone())
        loop.scorer = RewardScorer(equal)
        rollout = loop.run(PROMPTS[:2], 0, settings, replacements=iter(PROMPTS[2 : 2 + num_others]))
        assert {sample.prompt.id for sample in rollout.samples} == {"0", "1"}
        return [sample.completion.request.id for sample in rollout.samples]

    assert groups(0) == groups(1) == groups(6) == ["0/0/0", "0/0/1", "0/1/0", "0/1/1"]


@pytest.mark.parametrize("run_ahead", ["off", "draft", "keep"])
def test_what_was_sampled_under_other_settings_is_sampled_anew(run_ahead):
    before = Ranked(pass_s=0.0004, run_ahead="keep")
    before.run(3)

    def work(ranks: Threads) -> Rollout:
        loop = Ranked(run_ahead=run_ahead).loop(ranks)
        loop.load_state_dict(before.states[0])
        loop.sync_weights([], 3)
        return loop.run(prompts(3), 3, RolloutSettings(group_size=2, max_tokens=200))

    for sample in run_ranks(3, work)[0].samples:
        assert set(sample.completion.output.policy_versions.tolist()) == {3}


def test_every_rank_knows_when_each_worker_decoded_and_got_weights():
    ranked = Ranked(pass_s=0.002, run_ahead="draft").run(3)
    for step, rollout in enumerate(ranked[1]):
        assert rollout.spans == ranked[0][step].spans
        decoding = [span for span in rollout.spans if span.activity == "decode"]
        assert {span.worker for span in decoding} == {0, 1, 2}
        assert {span.number for span in decoding} <= {step, step + 1}
        assert {(span.worker, span.number) for span in rollout.spans if span.activity == "weights"} == {
            (worker, step) for worker in range(3)
        }
        assert sum(span.seconds for span in decoding) <= 3 * rollout.metrics["timing_s/rollout"]
    decoding = [(step, span) for step, each in enumerate(ranked[0]) for span in each.spans if span.activity == "decode"]
    assert any(span.number == step + 1 for step, span in decoding), "nobody ran ahead"
