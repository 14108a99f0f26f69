"""The engine verifies as many nodes as the run's budget says, and a budget that it cannot keep to is refused."""

from __future__ import annotations

import numpy as np
import pytest

from rhymerl.backends.sglang.backend import SGLangBackend
from rhymerl.budgets import AIMDBudget, Budget, FixedBudget, GoodputBudget
from rhymerl.drafters import HistoryTreeDrafter, NoDrafter
from rhymerl.errors import ConfigError
from rhymerl.testing import RandomTreeDrafter, make_requests
from tests.backends.sglang.test_server_info import OURS
from tests.backends.sglang.test_session import all_of, synced


class Own(Budget):
    """A user's own budget."""

    max_nodes = 3

    def limits(self, requests):
        return np.full(len(requests), 3, np.int32)


class OwnGoodput(GoodputBudget):
    """Of a user's, who may have overridden anything."""


@pytest.mark.parametrize(
    ("budget", "nodes", "num_tokens"),
    [
        (None, None, 8),
        (None, 4, 5),
        (GoodputBudget(), None, 8),
        (GoodputBudget(), 20, 21),
        (GoodputBudget(3), None, 4),
        (GoodputBudget(3), 3, 4),
        (FixedBudget(3), None, 4),
        (FixedBudget(16), None, 17),
        (FixedBudget(3), 3, 4),
        (FixedBudget(0), None, 1),
        (FixedBudget(16, min_probability=0.1), None, 17),
        (FixedBudget(16, min_probability=0.1), 5, 6),
        (AIMDBudget(), None, 33),
        (AIMDBudget(), 16, 17),
        (AIMDBudget(4), None, 5),
        (FixedBudget(0), 0, 1),
        (GoodputBudget(0), None, 1),
    ],
    ids=lambda value: f"{type(value).__name__}({value.nodes})" if isinstance(value, Budget) else str(value),
)
def test_the_engine_verifies_what_the_budget_says(budget, nodes, num_tokens):
    backend = SGLangBackend(nodes=nodes)
    backend.check_drafting(HistoryTreeDrafter(), budget)
    assert backend.num_tokens(HistoryTreeDrafter(), budget) == num_tokens


@pytest.mark.parametrize(
    ("budget", "nodes", "message"),
    [
        (FixedBudget(3), 7, r"backend\.nodes=7: expected 3, as budget\.nodes says, or null"),
        (FixedBudget(0), 7, r"backend\.nodes=7: expected 0, as budget\.nodes says, or null"),
        (GoodputBudget(0), 7, r"backend\.nodes=7: expected 0, as budget\.nodes says, or null"),
        (GoodputBudget(3), 7, r"backend\.nodes=7: expected at most 3, as budget\.nodes says"),
        (AIMDBudget(8), 9, r"backend\.nodes=9: expected at most 8, as budget\.nodes says"),
        (FixedBudget(3, min_probability=0.1), 7, r"backend\.nodes=7: expected at most 3, as budget\.nodes says"),
        (OwnGoodput(), None, r"budget=OwnGoodput: expected budget=goodput, aimd or fixed; SGLang verifies"),
        (Own(), None, r"budget=Own: expected budget=goodput, aimd or fixed; SGLang verifies"),
    ],
)
def test_a_budget_that_it_cannot_keep_to_is_refused(budget, nodes, message, flat_policy):
    backend = SGLangBackend(nodes=nodes)
    with pytest.raises(ConfigError, match=message):
        backend.check_drafting(HistoryTreeDrafter(), budget)
    with pytest.raises(ConfigError, match=message):
        backend.start(flat_policy, HistoryTreeDrafter(), budget=budget)


def test_without_a_drafter_no_budget_matters():
    SGLangBackend(nodes=7).check_drafting(NoDrafter(), AIMDBudget())


def test_a_cost_curve_chooses_within_the_budget(tmp_path):
    costs = tmp_path / "costs.json"
    costs.write_text('{"costs": [[1, 1.0], [10000, 1.001]]}')
    backend = SGLangBackend(costs=str(costs), expected_accept_rate=0.9)
    assert backend.num_tokens(HistoryTreeDrafter(), GoodputBudget()) == 32
    assert backend.num_tokens(HistoryTreeDrafter(), GoodputBudget(5)) == 6
    assert backend.num_tokens(HistoryTreeDrafter(), FixedBudget(5)) == 6
    assert backend.num_tokens(HistoryTreeDrafter(), AIMDBudget(5)) == 6


def run_at(engine, policy, drafter, budget=None, **settings):
    """Return how many nodes were verified for three answers of a server that says it verified 4 times."""
    with SGLangBackend(url=engine.url, max_running=4, **settings) as backend:
        backend.start(policy, drafter, budget=budget)
        synced(backend, policy, 0)
        backend.submit(make_requests(3, max_tokens=9, stop_token_ids=()))
        return {each.num_drafted for each in all_of(backend, 3).values()}


@pytest.mark.parametrize(
    ("budget", "settings", "message"),
    [
        (FixedBudget(7), {}, r"verifies 3 draft nodes of a request; expected 7, as budget\.nodes says"),
        (FixedBudget(0), {}, r"verifies 3 draft nodes of a request; expected 0, as budget\.nodes says"),
        (None, {"nodes": 2}, r"verifies 3 draft nodes of a request; expected at most 2, as backend\.nodes says"),
        (GoodputBudget(2), {}, r"verifies 3 draft nodes of a request; expected at most 2, as budget\.nodes says"),
    ],
)
def test_a_server_that_verifies_another_number_is_refused(engine, flat_policy, budget, settings, message):
    engine.answers["/server_info"] = 200, OURS
    with pytest.raises(ConfigError, match=rf"backend\.url='{engine.url}': the server there {message}"):
        run_at(engine, flat_policy, RandomTreeDrafter(), budget, **settings)


@pytest.mark.parametrize(("budget", "settings"), [(FixedBudget(3), {}), (GoodputBudget(), {"nodes": 3})])
def test_a_server_that_verifies_that_number_is_fine(engine, flat_policy, budget, settings):
    engine.answers["/server_info"] = 200, OURS
    assert run_at(engine, flat_policy, RandomTreeDrafter(), budget, **settings) == {12}


@pytest.mark.parametrize(
    ("drafter", "info", "message"),
    [
        (NoDrafter(), OURS, "drafter=none: the server there verifies 3 draft nodes of a request; expected the drafter"),
        (
            RandomTreeDrafter(),
            {**OURS, "speculative_algorithm": None},
            "drafter=RandomTreeDrafter: the server there drafts nothing; expected drafter=none",
        ),
    ],
)
def test_a_server_that_drafts_where_the_run_does_not_or_the_other_way_round_is_refused(
    engine, flat_policy, drafter, info, message
):
    engine.answers["/server_info"] = 200, info
    with pytest.raises(ConfigError, match=rf"backend\.url='{engine.url}', {message}"):
        run_at(engine, flat_policy, drafter)


@pytest.mark.parametrize("info", [(200, OURS), (404, {})], ids=["drafts", "does not say"])
def test_which_drafter_a_server_has_nobody_can_ask(engine, flat_policy, caplog, info):
    engine.answers["/server_info"] = info
    run_at(engine, flat_policy, RandomTreeDrafter())
    assert f"the SGLang server at {engine.url} drafts with the drafter that it was started with" in caplog.text
    assert "drafter=RandomTreeDrafter of this run has to be the same" in caplog.text


def test_a_server_without_drafts_suits_a_run_without_a_drafter(engine, flat_policy, caplog):
    engine.answers["/server_info"] = 200, {**OURS, "speculative_algorithm": None}
    assert run_at(engine, flat_policy, NoDrafter()) == {0}
    assert not caplog.text
