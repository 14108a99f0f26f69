"""`rhymerl replay` and `rhymerl simulate` with several parts, as one types it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rhymerl.cli import main
from rhymerl.history.traces import TraceWriter
from tests.documents import ROOT, blocks, reader_in, write_files
from tests.runs.test_replay import random_trace

FIGURES = ("tokens", "tokens_per_pass", "verified_per_token", "accept_rate", "draft_hit_rate", "predicted_speedup")
SMALL = ["workers=4", "steps=12", "seeds=2", "lengths.prompts_per_step=16", "lengths.group_size=4"]
DRAFTERS = """
import numpy as np
from rhymerl import Draft, Drafter


class Guess(Drafter):
    '''Drafts the same token, which of every so many drafts is none.'''

    def __init__(self, malformed_of: int = 3) -> None:
        self.malformed_of, self.number = malformed_of, 0

    def propose(self, request, context, budget):
        self.number += 1
        token = -1 if self.number % self.malformed_of == 0 else 5
        return Draft(token_ids=np.array([token], np.int32), parents=np.array([-1], np.int32))


class OnlyWrong(Guess):
    def __init__(self) -> None:
        super().__init__(malformed_of=1)


class Shapeless(Drafter):
    def propose_batch(self, requests, contexts, budgets):
        return [1, 2, 3]

    def propose(self, request, context, budget): ...


class Unrelated:
    pass
"""


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    with TraceWriter(path) as writer:
        writer.write(random_trace())
    return path


def run(words: Sequence[object], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = main([*map(str, words)])
    return (code, *capsys.readouterr())


def answer(words: Sequence[object], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    code, out, err = run([*words, "--json"], capsys)
    assert code == 0, err
    return json.loads(out)


def rows_in(out: str) -> dict[str, list[str]]:
    """The cells of a printed table by their row's name, the names of its columns under that of the first."""
    lines = [line.strip("│┃").replace("┃", "│").split("│") for line in out.splitlines() if line[:1] in ("│", "┃")]
    return {name.strip(): [cell.strip() for cell in cells] for name, *cells in lines}


# -- drafters ----------------------------------------------------------------------------------------------------------


def test_several_drafters_have_the_figures_that_each_has_alone(trace, capsys):
    words = ["replay", trace, "from_epoch=1", "budget.nodes=8"]
    found = answer([*words, "drafter=[history_tree,ngram]"], capsys)["drafters"]
    assert list(found) == ["history_tree", "ngram"]
    for name, figures in found.items():
        alone = answer([*words, f"drafter={name}"], capsys)
        assert [figures[each] for each in FIGURES] == [alone[each] for each in FIGURES]
    assert found["history_tree"]["tokens_per_pass"] > found["ngram"]["tokens_per_pass"] > 1


def test_a_table_of_drafters_begins_with_plain_decoding(trace, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    code, out, err = run(["replay", trace, "drafter=[history_tree,ngram]"], capsys)
    assert (code, err) == (0, "")
    rows = rows_in(out)
    assert list(rows) == ["drafter", "none", "history_tree", "ngram"]
    measured = rows_in(run(["replay", trace, "drafter=[none,ngram]"], capsys)[1])
    timed = rows["drafter"].index("propose us")
    assert len({tuple(cells[:timed] + cells[timed + 1 :]) for cells in (rows["none"], measured["none"])}) == 1


def test_a_chart_of_drafters(trace, tmp_path, capsys):
    for drafters in ("[history_tree,ngram]", "ngram"):
        path = tmp_path / "charts" / f"{len(drafters)}.png"
        answer(["replay", trace, f"drafter={drafters}", f"chart={path}"], capsys)
        assert path.read_bytes().startswith(b"\x89PNG")


# -- malformed drafts --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("drafter", "message"),
    [
        ("OnlyWrong", "drafts were malformed: OnlyWrong proposed a bad draft for request 0/0: a token id outside"),
        ("Shapeless", "drafts were malformed: Shapeless proposed a bad batch of drafts: "),
    ],
)
def test_a_drafter_whose_drafts_are_malformed_is_not_judged(drafter, message, trace, tmp_path, capsys):
    (tmp_path / "my_bad.py").write_text(DRAFTERS)
    with reader_in(tmp_path):
        code, out, err = run(["replay", trace, f"drafter=my_bad.{drafter}"], capsys)
    assert (code, out) == (1, "")
    (line,) = err.splitlines()
    assert message in line


def test_a_few_malformed_drafts_are_told_once(trace, tmp_path, capsys, caplog):
    (tmp_path / "my_few.py").write_text(DRAFTERS)
    with reader_in(tmp_path):
        code, _, _ = run(["replay", trace, "drafter=my_few.Guess"], capsys)
    assert code == 0
    assert sum("such drafts are left out" in record.message for record in caplog.records) == 1


def test_what_is_no_drafter_is_refused(trace, tmp_path, capsys):
    (tmp_path / "my_none.py").write_text(DRAFTERS)
    with reader_in(tmp_path):
        code, _, err = run(["replay", trace, "drafter=my_none.Unrelated"], capsys)
    assert (code, err) == (2, "error: drafter: expected a subclass of rhymerl.Drafter, and Unrelated is none\n")


# -- schedulers --------------------------------------------------------------------------------------------------------


def test_several_schedulers_have_the_figures_that_each_has_alone(capsys):
    found = answer(["simulate", *SMALL, "scheduler=[sorted,paced]"], capsys)
    assert list(found["schedulers"]) == ["sorted", "paced"]
    for name, figures in found["schedulers"].items():
        alone = answer(["simulate", *SMALL, f"scheduler={name}"], capsys)
        assert {each: alone[each] for each in figures} == figures
    fifo = answer(["simulate", *SMALL, "scheduler=fifo"], capsys)
    assert {each: fifo[each] for each in found["fifo"]["keep"]} == found["fifo"]["keep"]
    assert found["fifo"]["keep"]["speedup_over_fifo"] == 1
    assert found["fifo"]["off"]["speedup_over_fifo_barrier"] == 1
    assert found["fifo"]["off"]["speedup_over_fifo"] < 1


def test_a_table_of_schedulers_begins_with_fifo(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    words = ["simulate", *SMALL, "scheduler=[sorted,paced]", "gantt_steps=2"]
    code, out, err = run([*words, f"gantt={tmp_path / 'steps.png'}"], capsys)
    assert (code, err) == (0, "")
    assert list(rows_in(out)) == ["scheduler", "fifo, run_ahead=off", "fifo", "sorted", "paced"]
    assert (tmp_path / "steps.png").read_bytes().startswith(b"\x89PNG")
    assert list(rows_in(run([*words, "run_ahead=off"], capsys)[1]))[1:3] == ["fifo", "sorted"]


# -- pages -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ["own_drafter", "own_scheduler"])
def test_a_page_shows_what_is_printed(name, tmp_path, capsys, monkeypatch):
    page = ROOT / "docs" / f"{name}.md"
    monkeypatch.setenv("COLUMNS", "100")
    write_files(page, tmp_path)
    (tmp_path / "benchmarks").symlink_to(ROOT / "benchmarks")
    ((words,),) = [commands for block in blocks(page, "bash") if "=[" in str(commands := block.commands)]
    (shown,) = blocks(page, "text")
    with reader_in(tmp_path):
        code, out, _ = run(words[1:], capsys)
    assert code == 0
    assert without_times(out) == without_times(shown.text)


def without_times(out: str) -> list[str]:
    """The lines of a table without the sixth column where that is a time."""
    lines = [line.rstrip() for line in out.splitlines()]
    cells = [line.split("│") if "│" in line and "propose us" in out else [line] for line in lines]
    return ["│".join(line[:6] + line[7:]) for line in cells]


# -- what is typed -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["drafter=[ngram]"], "drafter=[ngram]: expected at least two names, none of them twice"),
        (["drafter=[]"], "drafter=[]: expected at least two names, none of them twice"),
        (["drafter=[ngram,ngram]"], "drafter=[ngram,ngram]: expected at least two names, none of them twice"),
        (["drafter=[ngram,3]"], "drafter=[ngram,3]: expected at least two names, none of them twice"),
        (["drafter=[ngram,ngramm]"], "drafter='ngramm': expected one of history_tree, ngram, none, paper, or"),
        (["drafter=[history_tree,ngram]", "drafter.window=3"], "unknown setting drafter.window"),
        (["drafter=[none,ngram]", "--print-config"], "--print-config shows the settings of one drafter, not of 2"),
        (["answers=-1"], "answers=-1: expected at least 0"),
        (["answers=many"], "answers='many': expected int"),
        (["chart=drafters.pdf"], "chart='drafters.pdf': expected a file that ends in .png"),
    ],
)
def test_bad_usage_is_one_line_and_exit_code_2(words, message, trace, capsys):
    code, out, err = run(["replay", trace, *words], capsys)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"error: {message}")
