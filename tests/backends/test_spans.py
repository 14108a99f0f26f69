"""Spans of workers: what follows closely is one."""

from __future__ import annotations

import pytest

from rhymerl.backends.spans import SpanLog, WorkerSpan


def span(start_s: float, end_s: float, number: int = 3, activity="decode") -> WorkerSpan:
    return WorkerSpan(worker=0, activity=activity, number=number, start_s=start_s, end_s=end_s)


def test_spans_that_follow_closely_are_one_and_others_are_not():
    log = SpanLog(7)
    for each in (
        span(0, 1),
        span(1.01, 2),
        span(2.1, 3),
        span(3, 4, number=4),
        span(4, 4, number=4, activity="weights"),
    ):
        log.add(each)
    found = [(each.worker, each.activity, each.number, each.start_s, each.end_s) for each in log.take()]
    assert found == [(7, "decode", 3, 0, 2), (7, "decode", 3, 2.1, 3), (7, "decode", 4, 3, 4), (7, "weights", 4, 4, 4)]
    assert log.take() == []


def test_what_has_just_ended_lasted_as_long_as_is_said():
    log = SpanLog()
    log.note("weights", 2, seconds=0.5)
    (found,) = log.take()
    assert (found.activity, found.number) == ("weights", 2)
    assert found.seconds == pytest.approx(0.5, abs=1e-6)


def test_a_wait_for_environments_is_left_out_with_the_gap_that_it_lies_in():
    log = SpanLog()
    for each in (
        span(0, 1),
        span(1, 1.01, activity="environment"),
        span(1.01, 2),
        span(2, 2.015, activity="environment"),
        span(2.015, 2.03, activity="environment"),
        span(2.03, 3),
        span(3, 3.01, activity="environment"),
        span(3.025, 3.03),
    ):
        log.add(each)
    found = [(each.activity, each.number, each.start_s, each.end_s) for each in log.take()]
    assert found == [
        ("decode", 3, 0, 2),
        ("environment", 3, 2, 2.03),
        ("decode", 3, 2.03, 3),
        ("environment", 3, 3, 3.01),  # it tells of most of a gap that is not left out
        ("decode", 3, 3.025, 3.03),
    ]
