"""What an accepted token is worth, learned from what rollouts were spared."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rhymerl.budgets import GoodputBudget
from rhymerl.budgets.worth import TokenWorth
from rhymerl.costs import CostCurve
from rhymerl.engine.engine import Engine
from rhymerl.testing import OracleDrafter, make_requests, tiny_policy
from rhymerl.types import Completion, Output

FLAT = CostCurve([(1, 1.0), (1000, 1.0)])  # rows cost nothing, so passes alone count


def completion(request, tokens: int, passes: int) -> Completion:
    output = Output(
        token_ids=np.zeros(tokens, np.int32),
        logprobs=np.zeros(tokens),
        policy_versions=np.zeros(tokens, np.int32),
        num_passes=passes,
    )
    return Completion(request=request, output=output)


def rollout(worth: TokenWorth, lengths: list[int], speeds: list[float], *, slots: int, cost: CostCurve = FLAT) -> None:
    """Requests of so many tokens, each of which makes `speeds` tokens a pass; a waiting one takes the slot of one that leaves."""
    requests, waiting, running = make_requests(len(lengths)), list(range(len(lengths))), dict[int, list[float]]()
    while waiting or running:
        while waiting and len(running) < slots:
            worth.admit(requests[waiting[0]])
            running[waiting.pop(0)] = [0.0, 0]
        rows, made = len(running), 0.0
        for number, state in running.items():
            step = min(speeds[number], lengths[number] - state[0])
            state[:] = state[0] + step, state[1] + 1
            made += step - 1
        worth.credit(made, rows, float(cost.seconds(rows, np.zeros(1), 0)[0]))  # type: ignore[arg-type]
        for number in [number for number, state in running.items() if state[0] >= lengths[number]]:
            passes = running.pop(number)[1]
            worth.finish(completion(requests[number], lengths[number], int(passes)), cost)


@pytest.mark.parametrize("cost", [FLAT, CostCurve([(1, 1.0), (101, 3.0)])])
@pytest.mark.parametrize(
    ("lengths", "speeds", "slots", "worth"),
    [
        ([40] * 8, [2] * 8, 8, 1.0),  # all are twice as fast, so everything is
        (list(range(16, 136, 2)), [2] * 60, 4, 1.0),  # others wait for the slots
        ([40, 20, 20, 20, 20, 20, 20, 20], [1, 2, 2, 2, 2, 2, 2, 2], 8, 0.0),  # the slowest has no drafts
    ],
    ids=["even", "queue", "slowest"],
)
def test_a_token_is_worth_what_it_spares(cost, lengths, speeds, slots, worth):
    learned = TokenWorth()
    for _ in range(20):
        rollout(learned, lengths, speeds, slots=slots, cost=cost)
    assert learned.of(1) == 1.0, "a request that runs alone saves whole passes"
    assert learned.of(slots) == pytest.approx(worth, abs=0.25)


def test_it_is_forgotten_where_nothing_is_drafted():
    worth, request = TokenWorth(), make_requests(1)[0]
    for _ in range(10):
        rollout(worth, [40, 20, 20, 20], [1, 2, 2, 2], slots=4)
    low = worth.of(4)
    for _ in range(400):
        worth.admit(request)
        worth.finish(completion(request, 5, 5), FLAT)
    assert low < 0.7
    assert worth.of(4) > 0.95


def test_an_engine_that_counts_no_passes_teaches_nothing():
    worth, request = TokenWorth(), make_requests(1)[0]
    worth.admit(request)
    worth.credit(3, 2, 1.0)
    worth.finish(completion(request, 5, 0), FLAT)
    assert worth.state_dict() == TokenWorth().state_dict()


def finished(engine: Engine, requests) -> list[Completion]:
    engine.submit(requests)
    found: list[Completion] = []
    while engine.has_work:
        found += engine.run()
    return found


def test_drafts_that_never_help_the_slowest_are_given_up():
    """All answers but the longest are foreseen, and leave early for nothing."""
    policy, lengths = tiny_policy(), [60, 12, 14, 16, 18, 20, 22, 24]
    requests = [
        replace(each, sampling=replace(each.sampling, max_tokens=length, stop_token_ids=()))
        for each, length in zip(make_requests(8), lengths, strict=True)
    ]
    drafts = {each.request.id: each.token_ids for each in finished(Engine(policy.model), requests)}
    drafts[requests[0].id] = (drafts[requests[0].id] + 1) % 19
    budget = GoodputBudget(8, costs=[[1, 1.0], [9, 1.05], [100, 4.0]])
    engine, nodes = Engine(policy.model, drafter=OracleDrafter(drafts), budget=budget), []
    for _ in range(40):
        finished(engine, requests)
        nodes.append(float(budget.metrics()["budget/nodes_per_pass"]))
    assert np.mean(nodes[20:]) < 0.5 * np.mean(nodes[:3])
