"""The settings that an engine's process reads, and the drafter that it makes of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from rhymerl.backends.remote.drafter_feed import Counters, FeedMessage, FeedWriter
from rhymerl.backends.sglang.nodes import num_sizes, widths_to
from rhymerl.backends.sglang.plugin.names import VARIABLE
from rhymerl.backends.sglang.plugin.settings import EngineSettings
from rhymerl.budgets import AIMDBudget, FixedBudget, GoodputBudget
from rhymerl.config import describe
from rhymerl.drafters import HistoryTreeDrafter, RunAheadDrafter
from rhymerl.errors import BackendError


def test_what_is_written_is_read(tmp_path, monkeypatch):
    written = EngineSettings.of(HistoryTreeDrafter(), AIMDBudget(3), tmp_path)
    monkeypatch.setenv(VARIABLE, str(written.open()))
    assert EngineSettings.of_this_process() == written
    assert "" not in written.paths


@pytest.mark.parametrize("wraps", [lambda drafter: drafter, RunAheadDrafter], ids=["bare", "wrapped"])
def test_the_drafter_is_built_again_as_it_was(wraps, tmp_path):
    Counters(tmp_path / "counters", new=True)
    drafter = wraps(HistoryTreeDrafter(window=3))
    drafting = EngineSettings.of(drafter, None, tmp_path).drafting(FixedBudget(3), 19)
    assert describe(drafting.protocol.drafter) == describe(drafter)
    assert drafting.n == 4
    drafting.protocol.drafter.close()


def test_messages_that_an_earlier_engine_has_not_read_are_removed(tmp_path):
    """Numbers begin anew with each engine."""
    settings = EngineSettings.of(HistoryTreeDrafter(), None, tmp_path)
    settings.open()
    writer = FeedWriter(tmp_path / "feed")
    for _ in range(3):
        writer.write(FeedMessage())
    settings.drafting(FixedBudget(3), 19).protocol.drafter.close()
    assert list((tmp_path / "feed").iterdir()) == []
    writer.write(FeedMessage())
    assert len(list((tmp_path / "feed").iterdir())) == 1


def test_an_engine_of_older_settings_has_no_route(tmp_path, monkeypatch):
    file = EngineSettings.of(HistoryTreeDrafter(), None, tmp_path, has_route=True).open()
    monkeypatch.setenv(VARIABLE, str(file))
    assert EngineSettings.of_this_process().has_route
    content = json.loads(file.read_text())
    del content["has_route"]
    file.write_text(json.dumps(content))
    assert not EngineSettings.of_this_process().has_route


@pytest.mark.parametrize(
    ("given", "widths"),
    [
        (None, (0, 2, 4, 8, 12)),
        (GoodputBudget(32, costs=[[0, 1.0], [64, 2.0]]), (0, 2, 4, 8, 12)),
        (FixedBudget(12), (12,)),
        (FixedBudget(16, min_probability=0.1), (0, 2, 4, 8, 12)),
        (AIMDBudget(32, start=3, increase=1, max_batch_size=7), (0, 2, 4, 8, 12)),
    ],
    ids=["by default", "goodput", "fixed", "fixed with a minimum", "aimd"],
)
def test_the_budget_of_the_engine_is_the_runs(given, widths, tmp_path):
    """It has the run's settings, and as many nodes as the engine."""
    settings = EngineSettings.of(HistoryTreeDrafter(), given, tmp_path)
    budget = settings.budget_of(13)
    assert budget.max_nodes == 12
    assert budget.widths == widths
    assert num_sizes(13, given) == len(widths)
    for name in ("costs", "min_probability", "start", "increase", "max_batch_size"):
        assert getattr(budget, name, None) == getattr(given, name, None)
    assert settings.budget_of(1).widths == (0,)


@pytest.mark.parametrize("nodes", [1, 2, 3, 16, 31])
def test_widths_are_few_and_end_with_the_most(nodes):
    widths = widths_to(nodes)
    assert (widths[0], widths[-1]) == (0, nodes)
    assert list(widths) == sorted(set(widths))
    assert len(widths) <= 6


@pytest.mark.parametrize(
    "content",
    [None, "", "{", "[]", "3", '{"drafter": {}}', '{"drafter": {}, "budget": {}, "folder": "x", "paths": 3}'],
)
def test_a_file_that_is_none_is_named(content, tmp_path, monkeypatch):
    path = tmp_path / "engine.json"
    if content is not None:
        path.write_text(content)
    monkeypatch.setenv(VARIABLE, str(path))
    with pytest.raises(BackendError, match=rf"{VARIABLE}='.*engine\.json': expected the file"):
        EngineSettings.of_this_process()


def test_a_class_of_the_users_own_is_found_by_the_trainers_import_path(tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    (home / "my_drafters.py").write_text(
        "from rhymerl.drafters import Drafter\n"
        "class Mine(Drafter):\n"
        "    def __init__(self, *, width: int = 1) -> None:\n"
        "        self.width = width\n"
        "    def propose(self, request, context, budget):\n"
        "        raise NotImplementedError\n"
    )
    config = {"_target_": "my_drafters.Mine", "width": 3}
    settings = EngineSettings(drafter=config, budget={}, folder=str(tmp_path), paths=(*sys.path, str(home)))
    file = settings.open()
    assert json.loads(file.read_text())["drafter"] == config
    code = (
        "from rhymerl.backends.sglang.plugin.settings import EngineSettings\n"
        "from rhymerl.budgets import FixedBudget\n"
        "print(EngineSettings.of_this_process().drafting(FixedBudget(3), 19).protocol.drafter.width)\n"
    )
    environment = {**os.environ, VARIABLE: str(file)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "3"


def test_the_plugin_does_nothing_in_an_engine_that_is_not_ours(monkeypatch):
    from rhymerl.backends.sglang.plugin import register

    monkeypatch.delenv(VARIABLE, raising=False)
    register()
    assert "rhymerl.backends.sglang.plugin.worker" not in sys.modules
