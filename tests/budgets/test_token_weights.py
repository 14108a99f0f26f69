"""Tokens of the requests that end last are worth more, by the lengths of earlier answers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rhymerl.budgets import GoodputBudget
from rhymerl.budgets.timeline import rows_of, starts_of
from rhymerl.budgets.token_weights import LengthTable, TokenWeights
from rhymerl.costs import CostCurve
from rhymerl.drafters import HistoryTreeDrafter, NoDrafter
from rhymerl.history import HistoryStore
from rhymerl.history.records import Answer
from rhymerl.history.traces import read_trace
from rhymerl.runs.replay import Replay, ReplayTotals
from rhymerl.testing import make_answer, make_requests

TRACE = Path(__file__).parents[2] / "benchmarks" / "traces" / "running_sum.jsonl.gz"
PER_REQUEST = CostCurve([(0, 1e-9), (100, 100)])  # all of a pass goes by its requests
FIXED = CostCurve([(0, 1), (100, 1.0001)])  # nothing does


def answers(lengths: Iterable[int], *, epoch: int = 0) -> list[Answer]:
    return [
        make_answer(np.zeros(length), policy_version=epoch, epoch=epoch, sample=sample)
        for sample, length in enumerate(lengths)
    ]


def history_of(requests, lengths) -> HistoryStore:
    history = HistoryStore()
    for request, length in zip(requests, lengths, strict=True):
        history.add(request.prompt, answers([length]))
    return history


def worth_of(requests, lengths) -> TokenWeights:
    """What is known when these requests run, of which the first ones were answered with so many tokens."""
    worth = TokenWeights()
    worth.follow(history_of(requests[: len(lengths)], lengths).snapshot())
    for request in requests:
        worth.enter(request)
    return worth


def test_where_nothing_is_fixed_all_tokens_are_worth_the_same():
    requests = make_requests(4)
    weights = worth_of(requests, [10, 20, 40, 80]).weights(requests, np.zeros(4, np.int64), PER_REQUEST)
    np.testing.assert_allclose(weights, 1.0, atol=1e-6)


def test_where_all_is_fixed_the_last_request_decides():
    # Spread: a tenth of the mean length of 37.5. Two requests that are both expected to be the last share what it is
    # worth.
    requests = make_requests(4)
    worth = worth_of(requests, [10, 20, 40, 80])
    np.testing.assert_allclose(worth.weights(requests, np.zeros(4, np.int64), FIXED), [0, 0, 0, 4], atol=1e-3)
    np.testing.assert_allclose(worth.weights(requests, np.array([0, 0, 0, 40]), FIXED), [0, 0, 2, 2], atol=0.02)


def test_nobody_waits_for_the_last_answer_of_a_later_step():
    requests = make_requests(4)
    requests = [replace(request, step=step) for request, step in zip(requests, (3, 3, 4, 4), strict=True)]
    worth = worth_of(requests, [10, 20, 40, 80])
    np.testing.assert_allclose(worth.weights(requests, np.zeros(4, np.int64), FIXED), [0, 4, 0, 0], atol=0.3)
    np.testing.assert_allclose(worth.weights(requests[2:], np.zeros(2, np.int64), FIXED), [0, 2], atol=0.01)
    unknown = worth_of(requests, []).weights(requests, np.zeros(4, np.int64), FIXED)
    np.testing.assert_allclose(unknown, [2, 2, 0, 0], atol=1e-3)
    assert worth_of(requests, []).weights(requests[2:], np.zeros(2, np.int64), FIXED) is None


def test_a_prompt_without_answers_is_held_to_be_as_long_as_the_others():
    requests = make_requests(3)
    worth = worth_of(requests, [10, 30])
    assert worth.weights(requests, np.array([0, 0, 0]), FIXED).argmax() == 1
    assert worth.weights(requests, np.array([0, 25, 0]), FIXED).argmax() == 2
    assert worth_of(requests, []).weights(requests, np.zeros(3, np.int64), FIXED) is None
    assert worth.weights(requests[:1], np.zeros(1, np.int64), FIXED) is None


def test_lengths_are_those_of_the_latest_epoch_and_their_error_is_learned():
    request, table, history = make_requests(1)[0], LengthTable(), HistoryStore()
    assert np.isnan(table.predict(request))
    history.add(request.prompt, answers([10, 30]))
    delta = history.snapshot()
    table.follow(delta)
    assert (table.predict(request), table.error) == (20.0, 0.0)
    history.add(request.prompt, answers([20, 40], epoch=1))
    delta = history.deltas(delta.version)
    table.follow(delta)
    assert (table.predict(request), table.error) == (30.0, pytest.approx(0.5))  # (0 + 20) / 2 of 20
    again = LengthTable()
    again.follow(history.snapshot())
    assert (again.predict(request), again.error) == (30.0, 0.0)


def test_groups_of_one_epoch_count_together_also_in_a_snapshot():
    request, table, history = make_requests(1)[0], LengthTable(), HistoryStore()
    delta = history.snapshot()
    for sample, length in enumerate((10, 30)):
        history.add(request.prompt, [answers([0] * sample + [length])[-1]])
        delta = history.deltas(delta.version)
        table.follow(delta)
    again = LengthTable()
    again.follow(history.snapshot())
    assert table.predict(request) == again.predict(request) == 20.0


def test_requests_enter_as_others_leave():
    # Two slots: lengths 3 and 1 begin, 2 follows the 1, and 4 the 3 and the 2, which end together.
    lengths = np.array([3, 1, 2, 4])
    starts = starts_of(lengths, 2)
    assert starts.tolist() == [0, 0, 1, 3]
    assert rows_of(starts, lengths).tolist() == [2, 2, 2, 1, 1, 1, 1]


class Unweighted(GoodputBudget):
    def note_running(self, requests, num_generated, *, num_waiting):
        pass


def rollouts(budget, drafter, costs, records) -> tuple[ReplayTotals, list]:
    """Replay a trace in batches of 32 requests; return the second epoch's totals and the budget's metrics of it."""
    replay = Replay(drafter, budget, max_running=32, costs=costs)
    inner, said = replay._replay, []

    def batches(of_epoch):
        budget.metrics()
        found = []
        for begin in range(0, len(of_epoch), 32):
            found.append(inner(of_epoch[begin : begin + 32]))
            said.append((of_epoch[0].record.epoch, budget.metrics().get("budget/expected_speedup")))
        return sum(found, ReplayTotals())

    replay._replay = batches
    totals = replay.run(records)
    drafter.close()
    return totals[1], [each for epoch, each in said if epoch == 1]


def test_known_lengths_make_rollouts_faster_and_what_is_said_of_them_holds():
    """A pass hardly takes longer for more tokens, as on a GPU: the speed-up is 1.67, and 1.83 with weights."""
    points = [(1, 6.5), (64, 7.5), (128, 8.5), (256, 14), (512, 25), (1024, 48)]
    records = [each for each in read_trace(TRACE) if each.epoch < 2]
    costs = CostCurve(points)
    plain, _ = rollouts(GoodputBudget(0, costs=points), NoDrafter(), costs, records)
    before, _ = rollouts(Unweighted(costs=points), HistoryTreeDrafter(deterministic=True), costs, records)
    after, said = rollouts(GoodputBudget(costs=points), HistoryTreeDrafter(deterministic=True), costs, records)
    assert plain.tokens == before.tokens == after.tokens
    assert after.cost < 0.94 * before.cost
    whole = sum(each.part for each in said) / sum(each.whole for each in said)
    assert whole == pytest.approx(plain.cost / after.cost, rel=0.02)
