"""Costs of SGLang's passes, from times that are known."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import rhymerl.bench.sglang
from rhymerl.backends.sglang.nodes import best_n
from rhymerl.bench.costs import CostTable, PathDrafter
from rhymerl.bench.sglang import Flown, SGLangCosts, pass_seconds, result_of
from rhymerl.costs import CostCurve
from rhymerl.drafters import NoDrafter
from rhymerl.errors import BackendError, ConfigError
from rhymerl.testing import ScriptedBackend, make_requests, tiny_policy


def flown(seconds, passes):
    return Flown(seconds=seconds, passes=passes)


def test_only_what_long_answers_take_longer_is_of_passes():
    start_s, pass_s = 5.0, 0.25
    short, long = flown([start_s + 10 * pass_s] * 2, [10, 10]), flown([start_s + 30 * pass_s] * 2, [30, 30])
    assert pass_seconds([short], [long]) == pytest.approx(pass_s)


def test_the_least_time_counts_with_its_own_passes():
    short = [flown([9.0], [10]), flown([2.0], [12])]
    long = [flown([4.0], [22]), flown([30.0], [20])]
    assert pass_seconds(short, long) == pytest.approx(0.2)


def test_the_last_request_ends_the_passes_that_accepted_drafts_spare_others():
    short, long = flown([0.8, 1.0], [8, 10]), flown([1.8, 2.0], [18, 20])
    assert pass_seconds([short], [long]) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("seconds", "passes", "side_by_side"),
    [
        ([2.0, 2.0, 2.1, 1.9], [20] * 4, True),
        ([1.0, 1.0, 2.0, 2.0], [20] * 4, False),  # two waited for the other two
        ([1.2, 2.0], [12, 20], True),  # one ended early because drafts were accepted
        ([0.9, 2.0], [3, 20], True),  # so few passes that its prefill is most of its time
    ],
)
def test_requests_that_waited_for_others_are_told(seconds, passes, side_by_side):
    assert flown(seconds, passes).ran_side_by_side is side_by_side


def test_figures_that_mean_nothing_are_refused():
    with pytest.raises(BackendError, match="does not run 2 requests side by side"):
        pass_seconds([flown([0.5, 1.0], [10, 10])], [flown([1.0, 2.0], [20, 20])])
    with pytest.raises(BackendError, match="20 passes took no longer than 10"):
        pass_seconds([flown([1.0], [10])], [flown([1.0], [20])])


TABLE = CostTable([1, 8, 32], [0, 1, 3], np.array([[1.0, 5.0, 5.0], [2.0, 6.0, 6.0], [3.0, 7.0, 9.0]]))


def test_the_curve_is_that_of_the_most_requests_and_below_of_fewer_without_drafts():
    assert TABLE.points_at(32) == [[1, 1.0], [8, 2.0], [32, 3.0], [64, 7.0], [128, 9.0]]
    assert TABLE.points_at(8) == [[1, 1.0], [8, 2.0], [16, 6.0], [32, 6.0]]
    assert TABLE.points_at(1) == [[1, 1.0], [2, 5.0], [4, 5.0]]


@given(st.lists(st.floats(1e-6, 10), min_size=9, max_size=9), st.sampled_from([1, 8, 32]))
def test_any_measured_costs_are_a_curve(seconds, rows):
    table = CostTable([1, 8, 32], [0, 1, 3], np.array(seconds).reshape(3, 3))
    curve = CostCurve(table.points_at(rows))
    here = table.table[[1, 8, 32].index(rows)]
    if (np.diff([*table.table[:, 0], *here]) >= 0).all():
        assert curve.seconds(rows, rows * table.nodes, rows) == pytest.approx(here, rel=1e-3)


def test_the_file_says_what_the_engine_was_and_what_pays():
    result = result_of(TABLE, 0.9)
    assert (result["engine"], result["max_running"]) == ("sglang", 32)
    assert result["table"]["seconds"] == TABLE.table.tolist()
    expected = [best_n(CostCurve(TABLE.points_at(rows)), rows, 0.9) - 1 for rows in (1, 8, 32)]
    assert result["table"]["best_nodes"] == expected
    assert expected[-1] == best_n(CostCurve(result["costs"]), 32, 0.9) - 1


class Clock:
    """A clock that goes at its own pace."""

    now = 0.0

    def perf_counter(self):
        return self.now


class PacedBackend(ScriptedBackend):
    """A pass takes 1 ms, and 1 ms for each request and node; an answer takes a pass a token, and half a second."""

    def __init__(self, nodes, clock):
        super().__init__(lambda request: [2] * request.sampling.max_tokens)
        self.nodes = nodes
        self.clock = clock
        self.drafter = None
        self.is_closed = False
        self.submitted = []

    def start(self, policy, drafter, **more):
        super().start(policy, drafter, **more)
        self.drafter = drafter

    def submit(self, requests):
        super().submit(requests)
        self.submitted.append(requests)

    def collect(self, timeout_s=None, *, max_passes=None):
        done = [
            replace(each, output=replace(each.output, num_passes=len(each.token_ids)))
            for each in super().collect(timeout_s)
        ]
        self.clock.now += 0.5 + 0.001 * (1 + len(done) + self.nodes) * max(each.num_passes for each in done)
        return done

    def close(self):
        super().close()
        self.is_closed = True


def test_each_number_of_nodes_has_an_engine_that_is_kept_busy(capsys, monkeypatch):
    engines, clock = [], Clock()
    monkeypatch.setattr(rhymerl.bench.sglang, "time", clock)

    def make(nodes):
        engines.append(PacedBackend(nodes, clock))
        return engines[-1]

    policy, requests = tiny_policy(), make_requests(2, stop_token_ids=(1,))
    table = SGLangCosts(make, policy, requests, rows=[4, 1, 4], nodes=[6, 2], passes=10, rounds=2).run()
    assert table.table == pytest.approx(np.array([[0.002, 0.004, 0.008], [0.005, 0.007, 0.011]]))
    assert [type(engine.drafter) for engine in engines] == [NoDrafter, PathDrafter, PathDrafter]
    assert [engine.nodes for engine in engines] == [0, 2, 6]
    assert [engine.drafter.nodes for engine in engines[1:]] == [2, 6]
    assert all(engine.is_closed for engine in engines)
    sent = [(len(batch), batch[0].sampling.max_tokens) for batch in engines[0].submitted]
    assert sent == [(rows, count) for rows in (4, 1) for count in (10, 10, 20, 10, 20)]
    assert all(not each.sampling.stop_token_ids for batch in engines[0].submitted for each in batch)
    assert "SGLang engines to start, one after another: 3" in capsys.readouterr().out


def test_answers_that_do_not_fit_are_refused_before_an_engine_starts():
    policy, requests = tiny_policy(context=64), make_requests(2)
    with pytest.raises(ConfigError, match=r"measure\.passes=30: .* context is 64"):
        SGLangCosts(pytest.fail, policy, requests, rows=[1], passes=30)


def test_a_path_fills_the_tree_of_every_request():
    request = make_requests(1)[0]
    drafter = PathDrafter(7, vocabulary=19)
    draft = drafter.propose(request, np.array([3, 18], np.int32), 7)
    assert draft.token_ids.tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert draft.parents.tolist() == [-1, 0, 1, 2, 3, 4, 5]
