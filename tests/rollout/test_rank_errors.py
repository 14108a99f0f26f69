"""Over several ranks, what a scheduler, an engine or another rank does wrong is an error that names it."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from rhymerl.errors import BackendError, ConfigError, RunError
from rhymerl.schedulers import FIFOScheduler, Move, Progress
from rhymerl.training.checks import check_workers
from tests.distributed.threads import Threads, run_ranks
from tests.rollout.ranked import PROMPTS, SETTINGS, Ranked, Restless, length, run_step
from tests.rollout.tokens import TokenBackend, expected


def test_ranks_with_other_prompts_are_refused_before_anything_is_drawn():
    backends = []

    def work(ranks: Threads) -> None:
        backends.append(TokenBackend(length))
        Ranked().loop(ranks, backends[-1]).run(PROMPTS[ranks.rank :: 2], 0, SETTINGS)

    with pytest.raises(ConfigError, match="rank 1 has other prompts than rank 0"):
        run_ranks(2, work)
    assert backends[0].num_passes == 0 or backends[1].num_passes == 0


class Dropping(FIFOScheduler):
    def plan(self, requests, num_workers, step):
        return super().plan(requests[:-1], num_workers, step)


def test_a_plan_that_drops_a_request_names_scheduler_and_request():
    with pytest.raises(ValueError, match="Dropping.plan drops the request '0/6/2'"):
        Ranked(Dropping).run(1)


class Doubling(TokenBackend):
    """Hands over each answer that it has twice."""

    def collect(self, timeout_s=None, *, max_passes=None):
        found = super().collect(timeout_s, max_passes=max_passes)
        return [*found, *found]


def test_an_answer_that_comes_twice_is_an_error():
    def work(ranks: Threads) -> None:
        Ranked().loop(ranks, Doubling(length)).run(PROMPTS, 0, SETTINGS)

    with pytest.raises(BackendError, match="Doubling gave the answer"):
        run_ranks(2, work)


class Nowhere(FIFOScheduler):
    def rebalance(self, progress: Progress) -> list[Move]:
        return [Move(request_id=progress.requests[0].id, worker=99)]


def test_a_move_to_nowhere_names_scheduler_and_request():
    with pytest.raises(ValueError, match="Nowhere.rebalance moves the request '0/.*' to worker 99: expected 0 to 1"):
        Ranked(Nowhere, size=2, pass_s=0.03).run(1)


def test_what_a_state_has_of_a_policy_that_is_too_old_is_sampled_again():
    before = Ranked(pass_s=0.0004, run_ahead="keep")
    before.run(3)
    state = before.states[0]
    for sampled in state["ahead"]["outputs"].values():
        sampled["policy_versions"] -= 1
    assert any(len(sampled["token_ids"]) for sampled in state["ahead"]["outputs"].values())
    for (rollout,) in Ranked(run_ahead="keep").run(1, states=[state], first=3):
        for sample in rollout.samples:
            assert set(sample.completion.output.policy_versions.tolist()) == {3}
            assert sample.completion.token_ids.tolist() == expected(sample.completion)


class Late(TokenBackend):
    """Samples with the first policy for ever."""

    def sync_weights(self, named_tensors, policy_version):
        """It never gets there."""


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(("run_ahead", "most"), [("off", 0), ("draft", 0), ("auto", 0), ("keep", 1)])
def test_no_step_is_trained_on_tokens_that_are_older_than_its_mode_allows(run_ahead, most, size):
    def work(ranks: Threads) -> None:
        loop = Ranked(run_ahead=run_ahead).loop(ranks, Late(length))
        for step in range(most + 1):
            run_step(loop, step)
        with pytest.raises(RunError, match=rf"step {most + 1}: a token was sampled {most + 1} updates ago"):
            run_step(loop, most + 1)

    run_ranks(size, work)


class Losing(TokenBackend):
    """Forgets the first request."""

    def submit(self, requests):
        super().submit(requests[1:])


class Uncounted(TokenBackend):
    counts_passes = False


@pytest.mark.parametrize(
    ("scheduler", "run_ahead", "is_refused"),
    [(FIFOScheduler, "off", False), (FIFOScheduler, "draft", True), (Restless, "off", True)],
)
def test_ranks_keep_step_by_passes_so_their_engines_must_count_them(scheduler, run_ahead, is_refused):
    ranked = Ranked(scheduler, size=2, lockstep=True, run_ahead=run_ahead)
    with (
        pytest.raises(ValueError, match="^lockstep=True: Uncounted cannot count passes")
        if is_refused
        else nullcontext()
    ):
        run_ranks(2, lambda ranks: ranked.loop(ranks, Uncounted(length)))
    settings = {"scheduler": scheduler(), "run_ahead": run_ahead, "lockstep": True, "workers": None}
    check_workers(Uncounted(length), **settings, num_ranks=1)
    check_workers(TokenBackend(length), **settings, num_ranks=2)
    message = rf"^deterministic=true with 2 workers and run_ahead={run_ahead}, scheduler={scheduler.__name__}: Uncounted cannot"
    with pytest.raises(ConfigError, match=message) if is_refused else nullcontext():
        check_workers(Uncounted(length), **settings, num_ranks=2)


@pytest.mark.parametrize("lockstep", [False, True])
def test_a_lost_request_is_an_error(lockstep):
    def work(ranks: Threads) -> None:
        Ranked(Restless, lockstep=lockstep).loop(ranks, Losing(length)).run(PROMPTS, 0, SETTINGS)

    with pytest.raises(BackendError, match=r"Losing lost \d requests"):
        run_ranks(2, work)
