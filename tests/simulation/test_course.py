"""Continuous batching in closed form: by hand, and against a simulator of single passes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rhymerl.simulation import Decoding
from rhymerl.simulation.course import Course
from tests.simulation.twin import decoded


def course(lengths, *, start: float = 0.0, drafts=None, **settings) -> Course:
    tokens = np.array(lengths, np.float64)
    given_drafts = np.zeros(len(tokens)) if drafts is None else np.array(drafts, np.float64)
    return Course(start, tokens, given_drafts, Decoding(**settings))


def test_a_queue_by_hand():
    # Three requests of 2, 4 and 8 tokens: 2 passes of three at 1 + 3/128, 2 of two at 1 + 2/128, 4 of one at 1 + 1/128.
    it = course([4, 2, 8], start=10)
    first, second, last = 10 + 2 * (1 + 3 / 128), 10 + 4 + 10 / 128, 10 + 8 + 14 / 128
    assert it.ends.tolist() == pytest.approx([second, first, last])
    assert it.end == pytest.approx(last)
    assert it.firsts.tolist() == [10, 10, 10]
    # One and a half passes from the end the longest has sampled 6.5 of 8 tokens.
    assert it.sampled(last - 1.5 * (1 + 1 / 128)).tolist() == pytest.approx([4, 2, 6.5])


def test_slots_by_hand():
    # Two slots: 3 and 2 run together for 2 passes; then 4 beside the last token of 3; then alone for 3 more.
    it = course([3, 2, 4], max_running=2)
    two, one = 1 + 2 / 128, 1 + 1 / 128
    assert it.firsts.tolist() == pytest.approx([0, 0, 2 * two])
    assert it.ends.tolist() == pytest.approx([3 * two, 2 * two, 3 * two + 3 * one])


def test_prefetched_tokens_are_verified_several_at_a_time():
    # With 3 nodes and acceptance 1 a pass emits 4 tokens and verifies 4: 8 tokens in 2 passes of 1 + 4/128, 5 more in 5
    # plain ones.
    it = course([13], drafts=[8], redo_acceptance=1.0, redo_nodes=3)
    assert it.end == pytest.approx(2 * (1 + 4 / 128) + 5 * (1 + 1 / 128))
    assert it.sampled(1 + 4 / 128).tolist() == pytest.approx([4])


def test_drafts_make_passes_dearer_and_fewer():
    it = course([8, 8], tokens_per_pass=2.0, verified=3.0)
    assert it.end == pytest.approx(4 * (1 + 6 / 128))


def test_an_empty_queue_ends_where_it_starts():
    assert course([], start=7).end == 7


@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=12),
    st.sampled_from([None, 1, 2, 3, 5]),
    st.floats(0, 100),
)
def test_as_a_simulator_of_single_passes(lengths, max_running, start):
    it = course(lengths, start=start, max_running=max_running)
    end, ends = decoded(start, lengths, max_running)
    assert it.end == pytest.approx(end)
    assert it.ends.tolist() == pytest.approx(ends)
    assert it.sampled(it.end).tolist() == lengths
