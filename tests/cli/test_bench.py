"""`rhymerl bench` ends in a table for people, and with --json in one object."""

from __future__ import annotations

import json

import pytest

from rhymerl.cli import main

TINY = ["task.train_size=1", "rollout.group_size=2", "concurrency=[1]"]
SMALL = [*TINY, "rollout.max_tokens=4", "epochs=1", "pairs=1"]
PASSES = [*TINY, "rollout.max_tokens=24", "measure.passes=4", "measure.rounds=1"]


def of_drafter(result):
    (row,) = result["rows"]
    assert 8 <= row["bytes_per_token"] <= 12
    assert row["propose_us"] > 0
    assert row["batch"] == 4


def of_rollout(result):
    rows = result["rows"]
    assert [row["drafter"] for row in rows] == ["none", "ngram", "history_tree_first_epoch", "history_tree", "oracle"]
    wanted = {"concurrency", "tokens_per_s", "speedup", "fraction_of_oracle", "predicted_speedup"}
    assert all(wanted <= row.keys() for row in rows)
    assert rows[0]["speedup"] == rows[-1]["fraction_of_oracle"] == 1


def of_costs(result):
    assert [tokens for tokens, _ in result["costs"]] == [1, 4]


@pytest.mark.parametrize(
    ("words", "shown", "check"),
    [
        (
            ["drafter", "answers=2", "tokens=220", "batch=4", "siblings=2", "repeats=1"],
            ["Drafter", "propose us"],
            of_drafter,
        ),
        (["rollout", *SMALL], ["Rollout speed", "history_tree_first_epoch", "oracle"], of_rollout),
        (
            ["costs", *PASSES, "measure.nodes=[0,3]"],
            ["Milliseconds of a pass, by running requests and draft nodes of each", "running"],
            of_costs,
        ),
    ],
    ids=["drafter", "rollout", "costs"],
)
def test_a_table_for_people_and_figures_for_programs(words, shown, check, capsys, monkeypatch):
    """One or the other on stdout; with JSON there, the table goes to stderr."""
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["bench", *words]) == 0
    out, err = capsys.readouterr()
    assert all(each in out for each in shown)
    assert "{" not in out
    assert err == ""
    assert main(["bench", *words, "--json"]) == 0
    out, err = capsys.readouterr()
    assert out.count("\n") == 1
    assert all(each in err for each in shown)
    check(json.loads(out))


def test_costs_are_what_a_budget_reads(capsys, tmp_path):
    from rhymerl.budgets import GoodputBudget

    assert main(["bench", "costs", *PASSES, "--json"]) == 0
    path = tmp_path / "costs.json"
    path.write_text(capsys.readouterr().out)
    assert GoodputBudget(costs=str(path)).max_nodes == 32
    result = json.loads(path.read_text())
    assert result["engine"] == "embedded"
    assert result["costs"][-1][0] == 33


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["rollout", "pairs=0"], "pairs=0: expected at least 1"),
        (["drafter", "tokens=3"], "tokens=3: expected more than 200"),
        (["costs", *PASSES, "measure.passes=0"], "measure.passes=0: expected at least 1"),
        (["costs", *PASSES, "measure.nodes=[3,-1]"], "measure.nodes=-1: expected at least 0"),
        (["costs", *PASSES, "backend=sglang", "backend.url=http://x:1"], "backend.url='http://x:1': expected null"),
        (["costs", *PASSES, "backend=sglang", "measure.passes=500"], "measure.passes=500: prompts and twice as many"),
    ],
)
def test_bad_input(words, message, capsys):
    assert main(["bench", *words]) == 2
    assert message in capsys.readouterr().err
