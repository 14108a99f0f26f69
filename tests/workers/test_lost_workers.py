"""A worker may be lost, hang, come late or be taken away: that only costs time, or ends the run with its reason."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest

from benchmarks.emulation.threads import ThreadBackend
from rhymerl.errors import BackendError
from rhymerl.rollout import Rollout
from rhymerl.workers import base
from tests.rollout.ranked import Restless, answers, check_kept, length, run_step
from tests.rollout.tokens import TokenBackend
from tests.workers.fleet import alone, fleet, run


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
        backend.hang_timeout_s = 2.0
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
        backend.hang_timeout_s = 2.0
        while not all(handle.is_here for handle in loop.workers.handles):
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
        connection._host.step = lambda ticks, **how: over.wait(0.3) or host_step(ticks, **how)
        assert answers(run_step(loop, 1)) == answers(alone(2)[1])
        connection._host.step = lambda ticks, **how: over.wait(30)
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
        backend.connections[2]._host.step = lambda ticks, **how: over.wait(30)
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
        connection.is_there = not number
        if number:
            connection.poll = lambda wait_s: connection._asked(lambda: self._when_there(connection, wait_s))
        return connection

    def _when_there(self, connection, wait_s: float):
        while not (connection.is_there or connection._killed.is_set() or self.room.wait(0.02)):
            pass
        connection.is_there = True
        return connection._host.poll(wait_s)


def test_workers_come_in_the_middle_of_a_step_and_are_taken_away():
    backend = Late(lambda number: TokenBackend(length, pass_s=0.004))
    with fleet(backend=backend, workers=4) as (loop, _):
        found = [run_step(loop, 0)]
        backend.start_timeout_s = 0.3
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


@pytest.mark.parametrize(
    "run_ahead", [*(pytest.param(each, marks=pytest.mark.slow) for each in ("off", "draft")), "keep"]
)
def test_moves_to_workers_that_are_lost_or_late_keep_nobody_waiting(run_ahead, monkeypatch):
    """Requests move anywhere all the time; workers are killed at random, and successors may come late or never."""
    monkeypatch.setattr(base, "REBALANCE_S", 0.005)
    steps = restless_steps(12, run_ahead)
    assert steps[-1].metrics["workers/lost"] > 0
    if run_ahead == "keep":
        check_kept(steps)
    else:
        assert [answers(one) for one in alone(len(steps))] == [answers(step) for step in steps]


def restless_steps(count: int, run_ahead: str) -> list[Rollout]:
    """Every other time there is no room for a worker for a whole step."""
    draw, backend = random.Random(run_ahead), Late(lambda number: TokenBackend(length, pass_s=0.001))
    steps: list[Rollout] = []
    with fleet(Restless, backend=backend, workers=4, run_ahead=run_ahead) as (loop, _):
        pool, over = loop.workers, threading.Event()

        def kill() -> None:
            while not over.wait(draw.uniform(0.0, 0.1)):
                handle = draw.choice(pool.handles[1:])
                if (
                    handle.is_up and pool._losses[handle.number] < 3
                ):  # one that is lost again and again would end the run
                    handle.connection.kill()

        thread = threading.Thread(target=kill)
        thread.start()
        try:
            while len(steps) < count:
                (backend.room.set if len(steps) % 2 else backend.room.clear)()
                steps += soon(partial(run_step, loop, len(steps)))
        finally:
            over.set()
            thread.join()
            backend.room.set()
    return steps


def soon(call) -> list[Rollout]:
    """What it returns within the time after which a worker counts as lost, or nothing."""
    found: list[Rollout] = []
    thread = threading.Thread(target=lambda: found.append(call()), daemon=True)
    thread.start()
    thread.join(30)
    assert found, "it hangs"
    return found


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
