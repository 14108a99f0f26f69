"""Workers apart from the ranks: when tokens are sampled, and by whom, changes nothing else; a worker may be lost at any time."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from torch import nn

from rhymerl.backends.hosted.threads import ThreadBackend
from rhymerl.drafters import NoDrafter
from rhymerl.errors import BackendError
from rhymerl.rewards import RewardScorer
from rhymerl.rollout import Rollout, RolloutLoop
from rhymerl.schedulers import FIFOScheduler
from tests.distributed.threads import run_ranks
from tests.rollout.ranked import REWARD, SCHEDULERS, SETTINGS, Ranked, answers, length, prompts, run_step
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


@pytest.mark.parametrize("lockstep", [False, True], ids=["free", "lockstep"])
@pytest.mark.parametrize("run_ahead", ["off", "draft"])
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_workers_give_the_samples_that_one_process_gives(scheduler, run_ahead, lockstep):
    with fleet(scheduler, pass_s=0.0002, run_ahead=run_ahead, lockstep=lockstep) as (loop, _):
        for one, other in zip(alone(4), run(loop, range(4), update_s=0.01), strict=True):
            assert answers(one) == answers(other)
            assert [sample.reward for sample in one.samples] == [sample.reward for sample in other.samples]
            assert other.metrics["off_policy/staleness/max"] == 0


@pytest.mark.parametrize("lockstep", [False, True], ids=["free", "lockstep"])
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_kept_tokens_are_at_most_one_policy_old(scheduler, lockstep):
    with fleet(scheduler, pass_s=0.0004, run_ahead="keep", lockstep=lockstep) as (loop, _):
        steps = run(loop, range(6), update_s=0.01)
    stale = check_kept(steps)
    assert stale > 0, "nobody went on during the update"


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


def test_a_step_is_sampled_while_the_one_before_is_trained():
    with fleet(pass_s=0.001, run_ahead="keep", workers=2) as (loop, _):
        run_step(loop, 0)
        time.sleep(0.6)  # of an update
        started = time.perf_counter()
        rollout = run_step(loop, 1)
        assert time.perf_counter() - started < 0.2
        assert rollout.metrics["off_policy/staleness/mean"] > 0.9
        assert rollout.metrics["workers/idle_frac"] < 1


def test_workers_go_on_during_every_update():
    """Also where a step was answered as a whole while the one before was trained."""
    with fleet(pass_s=0.001, run_ahead="keep", workers=2) as (loop, _):
        run_step(loop, 0)
        for step in range(1, 4):
            time.sleep(0.6)  # of an update
            started = time.perf_counter()
            rollout = run_step(loop, step)
            assert time.perf_counter() - started < 0.2
            assert rollout.metrics["off_policy/staleness/mean"] > 0.9


@pytest.mark.parametrize("run_ahead", ["off", "draft", "keep"])
def test_lost_workers_cost_nothing_but_time(run_ahead):
    """Workers are killed at random instants, several at once too."""
    draw = random.Random(run_ahead)
    with fleet(pass_s=0.001, run_ahead=run_ahead) as (loop, backend), killing(backend, draw, every_s=0.6) as kills:
        steps: list[Rollout] = []
        while len(steps) < 8 or len(kills) < 3:  # however fast this machine is
            steps += run(loop, [len(steps)], update_s=0.1)
    assert steps[-1].metrics["workers/lost"] > 0
    if run_ahead == "keep":
        check_kept(steps)
    else:
        assert [answers(one) for one in alone(len(steps))] == [answers(step) for step in steps]


@contextmanager
def killing(backend: ThreadBackend, draw: random.Random, *, every_s: float) -> Iterator[list[int]]:
    """Within, one or two of the workers that live are killed time and again."""
    kills: list[int] = []
    over = threading.Event()

    def kill() -> None:
        while not over.wait(draw.uniform(0.2, 1.8) * every_s):
            for connection in draw.sample(backend.connections[-3:], draw.choice([1, 1, 2])):
                connection.kill()
                kills.append(1)

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        yield kills
    finally:
        over.set()
        thread.join()


def test_a_worker_that_hangs_is_replaced():
    hangs, over = threading.Event(), threading.Event()

    class Hanging(TokenBackend):
        def _pass(self):
            if hangs.is_set() and self.number == 1 and self.life == 0:
                over.wait(30)
            return super()._pass()

    lives: dict[int, int] = {}

    def make(number: int) -> TokenBackend:
        backend = Hanging(length, pass_s=0.001)
        backend.number, backend.life = number, lives.get(number, 0)
        lives[number] = backend.life + 1
        return backend

    with fleet(make=make) as (loop, backend):
        backend.hang_timeout_s = 0.5
        run_step(loop, 0)
        hangs.set()
        backend.connections[1]._host.poll = lambda wait_s: over.wait(30)  # its process is stopped: it answers nobody
        rollout = run_step(loop, 1)
        over.set()
        assert answers(rollout) == answers(alone(2)[1])
        assert rollout.metrics["workers/lost"] == 1


def test_a_worker_that_hangs_before_it_has_weights_is_replaced():
    over = threading.Event()
    with fleet(make=lambda number: TokenBackend(length, pass_s=0.001)) as (loop, backend):
        backend.hang_timeout_s = 0.5
        while not all(member.is_here for member in loop.workers._crew.members):
            time.sleep(0.01)
        for connection in backend.connections:
            connection._host.poll = lambda wait_s: over.wait(30)
        time.sleep(0.3)  # until the questions that are under way are answered
        rollout = run_step(loop, 0)
        over.set()
        assert answers(rollout) == answers(alone(1)[0])
        assert rollout.metrics["workers/lost"] == 3


def test_a_worker_in_lockstep_that_hangs_ends_the_run_and_one_that_is_slow_does_not():
    over = threading.Event()
    with fleet(make=lambda number: TokenBackend(length), lockstep=True) as (loop, backend):
        backend.hang_timeout_s = 0.1
        run_step(loop, 0)
        connection = backend.connections[1]
        host_step = connection._host.step
        connection._host.step = lambda ticks: over.wait(0.3) or host_step(ticks)
        assert answers(run_step(loop, 1)) == answers(alone(2)[1])
        connection._host.step = lambda ticks: over.wait(30)
        connection.is_alive = lambda wait_s: False
        try:
            with pytest.raises(BackendError, match=r"^worker 1 is lost \(no answer for .* in lockstep$"):
                run_step(loop, 2)
        finally:
            over.set()


def test_a_worker_in_lockstep_that_does_not_come_up_ends_the_run():
    over = threading.Event()
    with fleet(make=lambda number: TokenBackend(length), lockstep=True) as (loop, backend):
        backend.start_timeout_s = 0.1
        backend.connections[2]._host.step = lambda ticks: over.wait(30)
        backend.connections[2].is_alive = lambda wait_s: False
        try:
            with pytest.raises(BackendError, match=r"^worker 2 has not come up within backend\.start_timeout_s=0\.1"):
                run_step(loop, 0)
        finally:
            over.set()


class Together(ThreadBackend):
    """The first weights wait for all workers. Worker 1 goes before it has them, and no other comes in its place."""

    starts_together = goes_on_short = True

    def __init__(self, make) -> None:
        super().__init__(make)
        self.over = threading.Event()

    def connect(self, number: int, *, lockstep: bool):
        connection = super().connect(number, lockstep=lockstep)
        if number == 1 and len(self.connections) <= 3:
            connection.kill()
        elif number == 1:
            connection._host.poll = lambda wait_s: self.over.wait(30)
        return connection


def test_the_first_weights_do_not_wait_for_the_place_of_a_worker_that_is_lost():
    backend = Together(lambda number: TokenBackend(length, pass_s=0.001))
    with fleet(backend=backend) as (loop, _):
        rollout = run_step(loop, 0)
        backend.over.set()
    assert answers(rollout) == answers(alone(1)[0])
    assert rollout.metrics["workers/up"] == 2


class Late(ThreadBackend):
    """The first worker is there at once; there is room for the others when `room` says so."""

    goes_on_short = True

    def __init__(self, make) -> None:
        super().__init__(make)
        self.room = threading.Event()

    def least_workers(self, num_workers: int) -> int:
        return 1

    def connect(self, number: int, *, lockstep: bool):
        connection = super().connect(number, lockstep=lockstep)
        if number:
            connection.poll = lambda wait_s: connection._pool.submit(self._when_there, connection, wait_s)
        return connection

    def _when_there(self, connection, wait_s: float):
        self.room.wait(30)
        return connection._told(lambda: connection._host.poll(wait_s))


def test_workers_come_in_the_middle_of_a_step_and_are_taken_away():
    backend = Late(lambda number: TokenBackend(length, pass_s=0.004))
    backend.start_timeout_s = 0.3
    with fleet(backend=backend, workers=4) as (loop, _):
        found = [run_step(loop, 0)]
        assert found[0].metrics["workers/up"] == 1
        time.sleep(0.5)  # longer than one may take that somebody waits for
        threading.Timer(0.1, backend.room.set).start()
        found.append(run_step(loop, 1))
        found.append(run_step(loop, 2))
        assert found[-1].metrics["workers/up"] == 4
        backend.room.clear()  # there is none for others in the place of these
        threading.Timer(0.05, lambda: [each.kill() for each in backend.connections[1:]]).start()
        found += run(loop, range(3, 6))
        assert found[-1].metrics["workers/up"] == 1
        assert found[-1].metrics["workers/lost"] == 3
        backend.room.set()
    assert [answers(one) for one in alone(6)] == [answers(step) for step in found]


def test_an_error_in_an_engine_ends_the_run_with_its_words():
    class Broken(TokenBackend):
        def _pass(self):
            raise RuntimeError("the engine is broken")

    words = r"^worker \d: RuntimeError\('the engine is broken'\)"
    with fleet(make=lambda number: Broken(length)) as (loop, _), pytest.raises(BackendError, match=words):
        run_step(loop, 0)


def test_a_worker_that_is_lost_again_and_again_ends_the_run():
    with fleet(make=lambda number: TokenBackend(length, pass_s=0.05), workers=1) as (loop, backend):
        over = threading.Event()

        def kill() -> None:
            while not over.wait(0.02):
                for connection in list(backend.connections)[-1:]:
                    connection.kill()

        thread = threading.Thread(target=kill)
        thread.start()
        try:
            with pytest.raises(BackendError, match="was lost 6 times"):
                run_step(loop, 0)
        finally:
            over.set()
            thread.join()


@pytest.mark.parametrize("run_ahead", ["draft", "keep"])
def test_a_resumed_run_goes_on_from_what_workers_had_told(run_ahead):
    with fleet(pass_s=0.002, run_ahead=run_ahead) as (loop, _):
        first = run(loop, range(2))
        time.sleep(0.8)  # they tell of their answers
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
