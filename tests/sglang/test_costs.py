"""The cost of SGLang's passes on this machine, and the number of nodes that follows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rhymerl.backends.base import RolloutBackend
from rhymerl.backends.sglang.nodes import best_n
from rhymerl.bench.sglang import SGLangCosts, result_of
from rhymerl.costs import CostCurve
from rhymerl.drafters import HistoryTreeDrafter, NoDrafter
from rhymerl.testing import make_requests, tiny_policy
from tests.sglang.engines import sglang

pytestmark = [pytest.mark.sglang, pytest.mark.usefixtures("cpu_engine")]


class WatchedCosts(SGLangCosts):
    """Remembers what each engine counted."""

    def _of_rows(self, backend: RolloutBackend, rows: int) -> float:
        backend.metrics()
        seconds = super()._of_rows(backend, rows)
        self.counted = {**getattr(self, "counted", {}), (backend.nodes, rows): backend.metrics()}
        return seconds


def test_the_number_of_nodes_follows_what_passes_of_sglang_cost(tmp_path: Path) -> None:
    policy = tiny_policy(dtype="float32", context=512)
    bench = WatchedCosts(
        lambda nodes: sglang(nodes=nodes, max_running=4),
        policy,
        make_requests(4),
        rows=[1, 4],
        nodes=[3],
        passes=24,
        rounds=2,
    )
    table = bench.run()
    assert (table.table > 1e-5).all()
    for rows in (1, 4):
        assert bench.counted[0, rows]["rollout/spec_accept_length"] == 1
        drafted = bench.counted[3, rows]
        assert drafted["spec/bad_drafts"] == 0
        assert drafted["spec/draft_hit_rate"] > 0.85  # the last token of an answer has no draft
        assert drafted["rollout/spec_accept_rate"] < 0.2
        tokens = 3 * 24 + 2 * 48
        # The requests shared passes; on a busy machine they do not all arrive in time for the same ones.
        assert 0.7 * tokens < drafted["rollout/passes"] < 0.6 * tokens * (1 + rows)

    file = tmp_path / "costs.json"
    file.write_text(json.dumps(result_of(table, 0.7)))
    assert [tokens for tokens, _ in json.loads(file.read_text())["costs"]] == [1, 4, 16]
    backend = sglang(nodes=None, max_running=4, costs=str(file))
    assert backend.num_tokens(HistoryTreeDrafter()) == best_n(CostCurve.read(file), 1, 0.7)
    assert backend.num_tokens(NoDrafter()) == 1
