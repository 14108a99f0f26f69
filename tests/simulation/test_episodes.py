"""Simulated episodes: by hand, against a simulator of single passes, and against a host with a slow environment."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rhymerl.costs import CostCurve
from rhymerl.environments.base import Environment
from rhymerl.schedulers import FIFOScheduler, HistoPipeScheduler, PacedScheduler, PackedScheduler, SortedScheduler
from rhymerl.simulation import Decoding, Simulation, StepWork, SyntheticLengths
from rhymerl.simulation.course import Course
from rhymerl.simulation.episodes import EpisodeCourse, left_of
from rhymerl.simulation.step import StepRun
from rhymerl.testing import make_requests
from rhymerl.types import Prompt, RolloutRequest, SamplingParams
from rhymerl.workers.host import Host
from tests.environments.test_episodes import STEP, Turns, episodes
from tests.products import pairs_first

ONE, TWO = 1 + 1 / 128, 1 + 2 / 128  # a pass of one request, and of two


def course(tokens, waits, *, start: float = 0.0, drafts=None, **settings) -> EpisodeCourse:
    given_drafts = np.zeros(len(tokens)) if drafts is None else np.array(drafts, np.float64)
    parts = (np.array(each, np.float64).reshape(len(tokens), -1) for each in (tokens, waits))
    return EpisodeCourse(start, *parts, given_drafts, Decoding(**settings))


def test_a_slot_goes_to_another_while_an_episode_waits():
    # One slot: 3 tokens of the first, 4 of the second while the first waits for 2, its other 3, and it waits again.
    it = course([[3, 3], [4, 0]], [[2, 2], [0, 0]], start=10, max_running=1)
    assert it.firsts.tolist() == pytest.approx([10, 10 + 3 * ONE])
    assert it.ends.tolist() == pytest.approx([10 + 10 * ONE + 2, 10 + 7 * ONE])
    assert it.end == max(it.ends)
    assert it.sampled(10 + 5 * ONE).tolist() == pytest.approx([3, 2])
    assert it.waited(10 + 4 * ONE).tolist() == pytest.approx([ONE, 0])
    assert it.sampled(it.end).tolist() == [6, 4]
    assert it.waited(it.end).tolist() == [4, 0]


def test_nothing_is_decoded_while_all_wait():
    it = course([[2, 2]], [[50, 0]])
    assert it.ends.tolist() == pytest.approx([4 * ONE + 50])
    assert it.sampled(2 * ONE + 30).tolist() == pytest.approx([2])


def test_a_pass_is_cheaper_while_one_waits():
    it = course([[2, 2], [6, 0]], [[3 * ONE, 0], [0, 0]])
    assert it.ends.tolist() == pytest.approx([3 * TWO + 4 * ONE, 3 * TWO + 3 * ONE])


@given(st.lists(st.integers(1, 30), min_size=1, max_size=12), st.sampled_from([None, 1, 2, 3, 5]), st.booleans())
def test_without_waits_it_is_the_closed_form(lengths, max_running, has_drafts):
    tokens = np.array(lengths, np.float64)
    drafts = tokens if has_drafts else np.zeros(len(tokens))  # all of an answer, or nothing
    settings = {"max_running": max_running, "tokens_per_pass": 1.5, "verified": 2.0}
    closed = Course(3.0, tokens, drafts, Decoding(**settings))
    it = course(tokens[:, None], np.zeros((len(tokens), 1)), start=3.0, drafts=drafts, **settings)
    for name in ("firsts", "ends", "end"):
        assert np.asarray(getattr(it, name)).tolist() == pytest.approx(np.asarray(getattr(closed, name)).tolist())
    middle = (3.0 + it.end) / 2
    assert it.sampled(middle).tolist() == pytest.approx(closed.sampled(middle).tolist())


def of_single_passes(tokens, waits, max_running) -> list[float]:
    """Return when each episode ends where replies are taken between passes."""
    now, left, turn = 0.0, tokens.tolist(), [0] * len(tokens)
    ready, running, ends = list(range(len(tokens))), [], [0.0] * len(tokens)
    replies: list[tuple[float, int]] = []
    while ready or running or replies:
        if not ready and not running:
            now = max(now, min(replies)[0])
        for reply in sorted(each for each in replies if each[0] <= now):
            replies.remove(reply)
            turn[reply[1]] += 1
            if turn[reply[1]] < tokens.shape[1]:
                ready.append(reply[1])
            else:
                ends[reply[1]] = reply[0]
        while ready and len(running) < (max_running or 99):
            running.append(ready.pop(0))
        now += (1 + len(running) / 128) if running else 0.0
        for number in running.copy():
            left[number][turn[number]] -= 1
            if not left[number][turn[number]]:
                running.remove(number)
                replies.append((now + waits[number, turn[number]], number))
    return ends


@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(0, 40)), min_size=1, max_size=10),
    st.sampled_from([None, 1, 2, 4]),
)
def test_as_a_simulator_of_single_passes(rows, max_running):
    tokens, waits = (np.repeat(np.array(each)[:, None], 3, axis=1) for each in zip(*rows, strict=True))
    it = course(tokens, waits, max_running=max_running)
    found = of_single_passes(tokens.copy(), waits.astype(np.float64), max_running)
    # A reply in the middle of a pass enters with the next one there.
    assert it.end == pytest.approx(max(found), abs=3 * 2 * len(rows))


def test_what_is_left_of_equal_turns():
    turns = np.array([3, 1, 3])
    whole, done = np.array([30.0, 8.0, 30.0]), np.array([0.0, 2.0, 15.0])
    assert left_of(whole, turns, done).tolist() == [[10, 10, 10], [6, 0, 0], [0, 5, 10]]


def test_synthetic_waits_leave_lengths_as_they_are():
    plain, waiting = (SyntheticLengths(turns=3, wait=wait).steps(12, 0) for wait in (0.0, 50.0))
    for one, other in zip(plain, waiting, strict=True):
        assert one.lengths.tolist() == other.lengths.tolist()
        assert (one.turns, one.waits) == (None, None)
    waits = np.array([work.waits for work in waiting])
    assert waits.mean() == pytest.approx(150, rel=0.05)
    assert set(np.concatenate([work.turns for work in waiting])) == {3}
    by_prompt = np.log(waits).reshape(12, 256, 16).mean(2)
    assert np.corrcoef(by_prompt[0], by_prompt[5])[0, 1] > 0.9, "a prompt keeps them from epoch to epoch"


def works(wait: float, num_steps: int = 12) -> list[StepWork]:
    """Return 32 prompts a step in two kinds, of which the first eight wait for four times so long."""
    plain = SyntheticLengths(prompts_per_step=32, group_size=4, mean=400.0, cap=1600, steps_per_epoch=2)
    waits = np.repeat([4 * wait] * 8 + [0.0] * 24, 4)
    return [replace(work, turns=np.full(128, 4), waits=waits) for work in plain.steps(num_steps, 0)]


@pytest.mark.parametrize(
    ("make", "max_running", "mode"),
    pairs_first(
        [FIFOScheduler, SortedScheduler, PackedScheduler, HistoPipeScheduler, PacedScheduler],
        [None, 8],
        ["off", "draft", "auto", "keep"],
    ),
)
def test_every_scheduler_in_every_mode_answers_all(make, max_running, mode):
    decoding = Decoding(max_running=max_running)
    it = Simulation(make(), num_workers=4, run_ahead=mode, decoding=decoding, rebalance_every=100.0).run(
        works(100.0, 6)
    )
    assert (np.diff(it.done) >= 0).all()
    for work, latencies, waits in zip(works(100.0, 6), it.latencies, it.waits, strict=True):
        assert np.isfinite(latencies).all()
        assert (latencies - waits >= work.waits + (0 if mode in ("draft", "auto") else work.lengths) - 1e-6).all()
    assert it.staleness.max() == (mode == "keep")


def test_steps_end_sooner_where_waits_are_predicted():
    ends = {}
    for lockstep in (True, False):
        scheduler = HistoPipeScheduler()
        scheduler.lockstep = lockstep  # then waits are not learned
        ends[lockstep] = Simulation(scheduler, num_workers=4).run(works(375.0)).done[-1]
    assert ends[True] > 1.2 * ends[False]


def test_an_episode_moves_with_what_it_has_waited():
    work = StepWork(
        requests=make_requests(2),
        lengths=np.array([20, 4]),
        is_cut=np.zeros(2, np.bool_),
        turns=np.array([2, 1]),
        waits=np.array([60.0, 0.0]),
    )
    free = Decoding(costs=CostCurve([(0, 1.0), (1000, 1.0)]))
    run = StepRun(work, [[0], [1]], np.zeros(2), np.zeros(2), decoding=free)
    assert run.finished.tolist() == pytest.approx([20 + 60, 4])
    for now, tokens in ((5.0, 5), (25.0, 10), (45.0, 15), (70.0, 20)):  # in a turn, waiting, in a turn, waiting
        run = StepRun(work, [[0], [1]], np.zeros(2), np.zeros(2), decoding=free)
        assert run.sampled(now)[0] == pytest.approx(tokens)
        run.move({0: 1}, now)
        assert run.finished[0] == pytest.approx(80)
        assert run.sampled(now)[0] == pytest.approx(tokens)


# -- against a host --------------------------------------------------------------------------------------------------

PASS_S, TURN = 0.01, 6


class Sleeps(Environment):
    """Takes as long as the row says, and has three turns."""

    def reply(self, row, turns):
        time.sleep(row["wait_s"])
        return None if len(turns) == 3 else "1"


def asked(waits_s) -> list[RolloutRequest]:
    sampling = SamplingParams(max_tokens=100)
    rows = [
        Prompt(id=str(number), key=str(number), token_ids=[number], text="", columns={"wait_s": wait_s})
        for number, wait_s in enumerate(waits_s)
    ]
    return [RolloutRequest(id=row.id, prompt=row, sample=0, seed=0, sampling=sampling, step=0) for row in rows]


def answered_s(host: Host, requests: list[RolloutRequest]) -> float:
    started = time.perf_counter()
    host.submit(requests, priority=0, versions=STEP)
    while len(host.finished) < len(requests):
        host.decode()
    host.finished.clear()
    return time.perf_counter() - started


@pytest.mark.parametrize("slots", [2, pytest.param(12, marks=pytest.mark.slow)])
def test_a_step_takes_as_long_as_with_a_host_and_its_environment(slots):
    """In one of ten tries at least: what else runs on this machine makes a real step longer."""
    waits_s = [0.0, 0.3, 0.1, 0.0, 0.6, 0.0, 0.2, 0.05, 0.0, 0.4, 0.0, 0.1]
    tokens, waits = np.full((12, 3), float(TURN)), np.repeat(np.array(waits_s)[:, None], 3, axis=1)
    tries = []
    with episodes(Sleeps()) as made:
        host = Host(Turns(TURN, max_running=slots, pass_s=PASS_S), version=0, episodes=made)
        answered_s(host, asked([0.0]))  # the environment's process starts
        while len(tries) < 10 and (not tries or tries[-1][0] != pytest.approx(tries[-1][1], rel=0.1)):
            real, pass_s = answered_s(host, asked(waits_s)), answered_s(host, asked([0.0])) / (3 * TURN)
            decoding = Decoding(costs=CostCurve([(0, pass_s), (100, pass_s)]), max_running=slots)
            tries.append((EpisodeCourse(0.0, tokens, waits, np.zeros(12), decoding).end, real))
    simulated, real = tries[-1]
    assert simulated == pytest.approx(real, rel=0.1), tries
