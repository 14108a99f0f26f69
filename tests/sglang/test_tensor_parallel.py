"""One engine over two processes: only the first has a drafter, and sends its trees to the other."""

from __future__ import annotations

import pytest

from rhymerl.drafters import HistoryTreeDrafter
from rhymerl.history import HistoryStore
from rhymerl.testing import make_requests, tiny_policy
from tests.sglang.conftest import CpuEngine
from tests.sglang.engines import answered, embedded, equal, largest_difference, remember, sglang, started
from tests.sglang.test_life import moved

pytestmark = [pytest.mark.sglang, pytest.mark.usefixtures("cpu_engine")]


@pytest.mark.parametrize("weights", ["disk", "tensor", "distributed"])
def test_answers_are_those_of_one_process(weights):
    policy = tiny_policy(dtype="float32", context=512)
    requests = make_requests(24, group_size=4, seed=3)
    environment = {**CpuEngine().environment, "SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
    with sglang(tensor_parallel=2, weights=weights, environment=environment) as backend:
        started(backend, policy, HistoryTreeDrafter())
        moved(policy)
        backend.sync_weights(policy.model.named_parameters(), 1)
        ours, history = embedded(policy, requests), HistoryStore()
        remember(history, ours)
        backend.follow(history)
        theirs = answered(backend, requests)
        metrics = backend.metrics()
    print(weights, equal(theirs, ours), metrics)
    assert equal(theirs, ours) >= 0.98
    assert largest_difference(theirs, ours) < 1e-4
    assert metrics["rollout/spec_accept_length"] > 3
