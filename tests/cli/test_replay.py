"""`rhymerl replay` as one types it."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rhymerl.cli import main
from rhymerl.history.traces import TraceRecord, TraceWriter
from rhymerl.runs.replay_report import report
from tests.documents import reader_in

COLUMNS = {"tokens_per_pass", "verified_per_token", "accept_rate", "propose_us"}


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Three epochs that repeat one another."""
    path = tmp_path / "trace.jsonl.gz"
    with TraceWriter(path) as writer:
        for epoch in range(3):
            writer.write(
                TraceRecord(
                    epoch=epoch,
                    prompt_id=str(prompt),
                    sample=sample,
                    prompt_tokens=np.array([prompt, 1], np.int32),
                    response_tokens=np.random.default_rng(prompt).integers(2, 30, 20 + 3 * sample + prompt),
                    reward=1.0,
                    finish_reason="stop",
                )
                for prompt in range(2)
                for sample in range(2)
            )
    return path


def run(words: Sequence[object], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    try:
        code = main(["replay", *map(str, words)])
    except SystemExit as error:  # argparse's way
        code = int(str(error.code))
    return (code, *capsys.readouterr())


def answer(words: Sequence[object], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    code, out, err = run([*words, "--json"], capsys)
    assert code == 0, err
    return json.loads(out)


@pytest.mark.parametrize("budget", ["fixed", "aimd", "goodput"])
@pytest.mark.parametrize("drafter", ["none", "ngram", "history_tree", "paper"])
def test_every_drafter_under_every_budget(drafter, budget, trace, capsys):
    result = answer([trace, f"drafter={drafter}", f"budget={budget}", "from_epoch=1"], capsys)
    assert result.keys() >= COLUMNS
    assert result["tokens"] == 2 * (20 + 23 + 21 + 24)
    assert result["tokens_per_pass"] == 1.0 if drafter == "none" else result["tokens_per_pass"] >= 1.0
    if drafter in ("history_tree", "paper"):
        assert result["tokens_per_pass"] > 2
        assert 0 < result["accept_rate"] <= 1
    assert all(each.keys() >= COLUMNS for each in result["epochs"].values())
    assert list(result["epochs"]) == ["1", "2"]


def test_a_table_for_people(trace, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    code, out, err = run([trace, "budget.nodes=4"], capsys)
    assert (code, err) == (0, "")
    assert "Replay" in out
    assert "predicted speed-up" in out
    assert "assuming that a pass of n tokens takes 1 + n / 64; costs=FILE takes what rhymerl bench costs" in out
    assert "tokens per pass" in out


def test_the_prediction_says_what_it_is_from(trace, tmp_path, capsys):
    (tmp_path / "costs.json").write_text('{"costs": [[1, 1.0], [9, 90.0]]}')
    words = [trace, "budget=fixed", "budget.nodes=8", f"costs={tmp_path / 'costs.json'}"]
    assert answer(words, capsys)["predicted_from"] == str(tmp_path / "costs.json")
    out = run(words, capsys)[1]
    line = next(line for line in out.splitlines() if line.startswith("predicted speed-up 0."))
    assert f"with the costs of {tmp_path / 'costs.json'}; below 1 drafts lose: budget=goodput drafts what pays" in line
    assert "assuming" not in out


def test_json_is_one_object_and_the_table_goes_elsewhere(trace, capsys):
    code, out, err = run([trace, "--json"], capsys)
    assert (code, out.count("\n")) == (0, 1)
    assert json.loads(out).keys() >= COLUMNS
    assert "predicted speed-up" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["history.window=0"], "error: history.window=0: expected at least 1"),
        (["drafter.window=-1"], "error: drafter.window=-1: expected at least 0"),
        (["budget=goodput", "budget.costs=nothing.json"], "error: budget.costs='nothing.json': expected a JSON file"),
        (["costs=nothing.json"], "error: costs='nothing.json': expected a JSON file"),
        (["from_epoch=9"], "error: from_epoch=9: the trace ends with epoch 2"),
        (["from_epoch=x"], "error: from_epoch='x': expected int"),
        (["nodes=3"], "error: unknown setting nodes"),
    ],
)
def test_bad_usage_is_one_line_and_exit_code_2(words, message, trace, capsys):
    code, out, err = run([trace, *words], capsys)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(message)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{\n", "line 3: not valid JSON"),
        ("[]\n", "line 3: expected a JSON object"),
        ('{"epoch": -1}\n', "line 3: "),
        ('{"epoch": 0', "line 3: the line is cut off"),
    ],
)
def test_a_broken_trace_names_file_and_line(line, message, trace, tmp_path, capsys):
    lines = gzip.decompress(trace.read_bytes()).decode().splitlines(keepends=True)
    broken = tmp_path / "broken.jsonl"
    broken.write_text("".join([*lines[:2], line]))
    code, out, err = run([broken], capsys)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"error: trace {str(broken)!r}, {message}")


def test_a_trace_is_needed(capsys):
    code, _, err = run([], capsys)
    assert code == 2
    assert "the following arguments are required: TRACE" in err


def test_a_drafter_without_history_is_judged(trace, capsys):
    assert answer([trace, "drafter.window=0"], capsys)["tokens_per_pass"] >= 1


def test_what_has_to_be_compiled_is_so_before_the_first_epoch(trace, tmp_path, capsys, monkeypatch):
    """By another drafter, which leaves nothing behind."""
    (tmp_path / "my_warm.py").write_text(
        "from rhymerl import Draft, Drafter\n\n\nclass Warm(Drafter):\n    told = []\n"
        "    def __init__(self):\n        self.told.append('made')\n"
        "    def close(self):\n        self.told.append('closed')\n"
        "    def propose(self, request, context, budget):\n"
        "        self.told.append('asked')\n        return Draft(token_ids=[], parents=[])\n"
    )
    with reader_in(tmp_path):
        assert answer([trace, "drafter=my_warm.Warm"], capsys)["tokens_per_pass"] == 1
        from my_warm import Warm

        steps = [name for name, _ in groupby(Warm.told)]
    assert steps == ["made", "asked", "closed", "made", "asked", "closed"]


def test_no_figure_is_in_powers_of_ten(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    each = dict.fromkeys(COLUMNS | {"draft_hit_rate"}, 5470.0)
    shown = {"predicted_speedup": 1.0, "predicted_from": "x", "answers": 1, "recorded_answers": 1, "similarity": 1.0}
    report({**each, **shown, "length_same_group": 1.0, "length_spearman": 1.0, "epochs": {0: each}})
    out = capsys.readouterr().out
    assert "5,470" in out
    assert "e+" not in out
