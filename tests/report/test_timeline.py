"""Bars of workers: what is decoded before the step before has ended is ahead of its turn."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rhymerl.backends.spans import EVALUATION, WorkerSpan
from rhymerl.report.base import Run, StepTimes
from rhymerl.report.timeline import timeline_of
from rhymerl.report.trace import _of_waits


def decode(worker: int, number: int, start_s: float, end_s: float) -> WorkerSpan:
    return WorkerSpan(worker=worker, activity="decode", number=number, start_s=start_s, end_s=end_s)


def run_of(*steps: tuple[float, list[WorkerSpan]], workers_apart: bool) -> Run:
    made = [
        StepTimes(step=number, ended_at=ended_at, spans=spans, seconds={"update": 2.0}, workers_apart=workers_apart)
        for number, (ended_at, spans) in enumerate(steps, start=1)
    ]
    return Run(path=Path(), name="a", settings={}, summary={}, curves={}, evaluations={}, steps=made)


def bars(run: Run) -> list[tuple[int, str, int, float, float]]:
    timeline = timeline_of(run)
    assert timeline is not None
    return [(bar.row, bar.kind, bar.step, bar.start_s, bar.end_s) for bar in timeline.bars]


def test_a_span_is_divided_where_the_step_before_ends():
    first = [decode(3, 0, 100, 103), decode(5, EVALUATION, 90, 91)]
    second = [decode(3, 1, 103, 108), decode(5, 1, 105, 107)]  # told with their step, begun during the update before
    run = run_of((105, first), (111, second), workers_apart=True)
    assert bars(run) == [
        (0, "rollout", 1, 10, 13),
        (0, "ahead", 2, 13, 15),
        (0, "rollout", 2, 15, 18),
        (1, "rollout", 2, 15, 17),
        (2, "update", 1, 13, 15),
        (2, "update", 2, 19, 21),
    ]
    timeline = timeline_of(run)
    assert timeline is not None
    assert timeline.rows == ["worker 3", "worker 5", "trainer"]


@pytest.mark.parametrize(("num_steps", "num_shown"), [(10, 10), (3_000, 666)])
def test_a_long_run_shows_its_last_steps(num_steps, num_shown):
    steps = [
        (10.0 * n + 9, [decode(0, n, 10 * n, 10 * n + 5), decode(1, n, 10 * n, 10 * n + 4)]) for n in range(num_steps)
    ]
    timeline = timeline_of(run_of(*steps, workers_apart=False))
    assert timeline is not None
    assert [step for step, _ in timeline.step_ends] == list(range(num_steps - num_shown + 1, num_steps + 1))


def test_a_run_of_which_nobody_noted_anything_has_none():
    assert timeline_of(run_of(workers_apart=False)) is None
    assert timeline_of(run_of((1.0, []), workers_apart=False)) is None


def test_waiting_for_environments_is_told_from_decoding():
    wait = replace(decode(0, 1, 103, 106), activity="environment")
    evaluation = replace(decode(0, EVALUATION, 106, 107), activity="environment")
    run = run_of((105, [decode(0, 0, 100, 103)]), (111, [wait, evaluation]), workers_apart=True)
    assert (0, "environment", 2, 3, 6) in bars(run)
    timeline = timeline_of(run)
    assert timeline is not None
    assert list(timeline.kinds) == ["rollout", "environment", "update"]


def test_a_trace_counts_the_episodes_that_wait_whatever_their_steps():
    events = list(_of_waits([(3.0, 5.0), (1.0, 4.0), (5.0, 6.0), (7.0, 7.0)], trainer=2))
    assert [(each["ts"] / 1e6, each["args"]["episodes"]) for each in events] == [
        *((1, 1), (3, 2), (4, 1), (5, 2), (5, 1), (6, 0)),
        *((7, 1), (7, 0)),
    ]
    assert {(each["ph"], each["pid"]) for each in events} == {("C", 2)}
