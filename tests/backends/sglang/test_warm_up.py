"""Before an engine is ready numba has compiled what its passes will call."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter

import pytest

from rhymerl import compiled
from rhymerl.backends.sglang.plugin.drafting import EngineDrafting
from rhymerl.backends.sglang.plugin.settings import EngineSettings
from rhymerl.budgets import AIMDBudget, Budget, FixedBudget, GoodputBudget
from rhymerl.drafters import Drafter, HistoryTreeDrafter, NGramDrafter, RunAheadDrafter
from rhymerl.history import HistoryStore
from rhymerl.testing import make_requests
from tests.backends.sglang.batches import Recorder, fake, run
from tests.backends.sglang.batches import answer as past


@pytest.fixture
def calls(monkeypatch):
    """Calls since it was cleared: names and argument types, for each of which numba compiles a function anew."""
    import numba

    found, original = set(), compiled._Compiled.__call__

    def call(self, *args):
        found.add((self.function.__qualname__, *(str(numba.typeof(each)) for each in args)))
        return original(self, *args)

    monkeypatch.setattr(compiled._Compiled, "__call__", call)
    return found


@pytest.mark.parametrize("drafter", [HistoryTreeDrafter(), NGramDrafter(), RunAheadDrafter(HistoryTreeDrafter())])
@pytest.mark.parametrize("budget", [GoodputBudget(), FixedBudget(7), AIMDBudget(7)])
def test_answers_call_nothing_that_the_warm_up_has_not(drafter: Drafter, budget: Budget, calls, tmp_path):
    settings = EngineSettings.of(drafter, budget, tmp_path)
    settings.warm_up(8, 19)
    before = set(calls)
    calls.clear()

    requests = make_requests(4, group_size=2, max_tokens=40, stop_token_ids=())
    answers = [[2 + (i * (3 + row)) % 7 for i in range(60)] for row in range(len(requests))]
    history = HistoryStore()
    for request, answer in zip(requests, answers, strict=True):
        history.add(request.prompt, [past(answer)])
    drafting = EngineDrafting(drafter, settings.budget_of(8), vocabulary=19)
    drafting.protocol.follow(history.snapshot())
    for overlap in (False, True):
        names = [dataclasses.replace(each, id=f"{each.id}/{overlap}") for each in requests]
        run(drafting, list(map(fake, names, answers)), overlap=overlap)
    drafting.protocol.close()
    assert calls, "this test shows nothing"
    assert calls <= before


def test_it_leaves_nothing_out_where_the_machine_is_busy(calls, tmp_path, monkeypatch):
    """Slow third drafts look like a loss: by the machine's clock the drafter would be left alone."""
    settings = EngineSettings.of(NGramDrafter(), GoodputBudget(), tmp_path)
    settings.warm_up(8, 19)
    before = set(calls)
    calls.clear()
    propose, asked = NGramDrafter.propose, Counter()

    def slow(drafter, *args, **named):
        asked[drafter] += 1
        time.sleep(0.3 if asked[drafter] == 3 else 0)
        return propose(drafter, *args, **named)

    monkeypatch.setattr(NGramDrafter, "propose", slow)
    settings.warm_up(8, 19)
    assert sum(asked.values()) > 3
    assert calls == before


def test_a_drafter_of_the_user_s_own_hears_nothing(tmp_path, monkeypatch):
    heard = []
    monkeypatch.setattr(Recorder, "note", lambda self, *what: heard.append(what))
    EngineSettings.of(Recorder(), FixedBudget(7), tmp_path).warm_up(8, 19)
    assert not heard
