"""Passes of any size change the speed and nothing else."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from rhymerl.budgets import GoodputBudget
from rhymerl.drafters import HistoryTreeDrafter
from rhymerl.history import HistoryStore
from rhymerl.testing import make_requests, tiny_policy
from tests.sglang.conftest import CpuEngine
from tests.sglang.engines import answered, embedded, equal, largest_difference, remember, sglang, started

pytestmark = [pytest.mark.sglang, pytest.mark.usefixtures("cpu_engine")]

SCHEDULE = [0, 8, 2, 16, 4]


@pytest.fixture(scope="module")
def problem():
    """Policy, requests, their answers without drafts, and a history in which drafts find them."""
    policy, requests, history = (
        tiny_policy(dtype="float32", context=512),
        make_requests(64, group_size=4),
        HistoryStore(),
    )
    ours = embedded(policy, requests)
    remember(history, ours)
    return policy, requests, ours, history


def environment(**variables: str) -> dict[str, str]:
    return {**CpuEngine().environment, **variables}


@pytest.mark.parametrize("variables", [{}, {"RHYMERL_TEST_MASKS": "1"}], ids=["cpu", "masks as on a gpu"])
def test_a_schedule_of_widths(problem, tmp_path: Path, variables):
    policy, requests, ours, history = problem
    seen = tmp_path / "seen"
    given = {"RHYMERL_TEST_WIDTHS": ",".join(map(str, SCHEDULE)), "RHYMERL_TEST_WIDTHS_SEEN": str(seen), **variables}
    with sglang(nodes=max(SCHEDULE), environment=environment(**given)) as backend:
        started(backend, policy, HistoryTreeDrafter(), GoodputBudget())
        backend.follow(history)
        theirs, metrics = answered(backend, requests), backend.metrics()
    passes = Counter(map(int, seen.read_text().split()))
    print(equal(theirs, ours), largest_difference(theirs, ours), passes, metrics)
    assert sorted(passes) == sorted(SCHEDULE)
    assert min(passes.values()) >= 3
    assert equal(theirs, ours) >= 0.98
    assert largest_difference(theirs, ours) < 1e-4
    assert metrics["rollout/spec_accept_length"] > 1.5


def test_two_ranks_take_passes_of_one_size(problem, tmp_path: Path):
    policy, requests, ours, history = problem
    seen = tmp_path / "seen"
    given = {"RHYMERL_TEST_WIDTHS": ",".join(map(str, SCHEDULE)), "RHYMERL_TEST_WIDTHS_SEEN": str(seen)}
    variables = environment(SGLANG_CPU_OMP_THREADS_BIND="0|1", **given)
    with sglang(nodes=max(SCHEDULE), tensor_parallel=2, environment=variables) as backend:
        started(backend, policy, HistoryTreeDrafter(), GoodputBudget())
        backend.follow(history)
        theirs = answered(backend, requests)
    assert {int(width) for width in seen.read_text().split()} == set(SCHEDULE)
    assert equal(theirs, ours) >= 0.98
    assert largest_difference(theirs, ours) < 1e-4


def test_goodput_chooses_in_the_engine(problem):
    """With the cost of passes and the gain of drafts: history has every answer, and nodes cost hardly anything."""
    policy, requests, ours, history = problem
    with sglang(nodes=16) as backend:
        started(backend, policy, HistoryTreeDrafter(), GoodputBudget())
        backend.follow(history)
        theirs = {}
        for start in range(0, len(requests), 8):
            theirs.update(answered(backend, requests[start : start + 8]))
        metrics = backend.metrics()
    print(equal(theirs, ours), metrics)
    assert equal(theirs, ours) >= 0.98
    assert 0 < metrics["budget/nodes_per_pass"] <= 16 * 8
    assert metrics["rollout/spec_accept_length"] > 1
    assert 0 < metrics["rollout/spec_accept_rate"] <= 1
