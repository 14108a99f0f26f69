"""The output that a person sees on a terminal, and that a file gets."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import termios
from pathlib import Path

import pytest

from rhymerl.report.printing import readable
from tests.integration import programs
from tests.integration.conftest import CHEAP_DRAFTS, Run


def seen_on_a_terminal(words: list[str], *, columns: int = 80) -> str:
    """All that was ever shown, without colours and cursor movements."""
    master, slave = pty.openpty()
    termios.tcsetwinsize(slave, (24, columns))
    process = programs.start(words, Path(os.ttyname(slave)))
    shown = b""
    while process.is_alive() or select.select([master], [], [], 0)[0]:
        if select.select([master], [], [], 0.1)[0]:
            shown += os.read(master, 65536)
    process.join()
    os.close(master)
    os.close(slave)
    assert process.exitcode == 0, shown.decode()
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown.decode()).replace("\r", "\n")


def test_a_bar_on_a_terminal_that_reaches_its_total(settings, tmp_path):
    shown = seen_on_a_terminal([*settings, f"run_dir={tmp_path / 'run'}"])
    assert "Evaluating on 4 held-out prompts" in shown
    assert re.search(r"step 12/12 .*reward \d\.\d{3}", shown)
    assert "weights_only" not in shown
    assert "Warning" not in shown


def test_the_bar_counts_batches_when_epochs_end_the_run(settings, tmp_path):
    more = ["trainer.max_steps=-1", "trainer.max_epochs=1", f"run_dir={tmp_path / 'run'}"]
    assert "step 3/3 " in seen_on_a_terminal([*settings, *more])


@pytest.mark.parametrize("columns", [60, pytest.param(120, marks=pytest.mark.slow)])
def test_the_line_and_the_answers_are_as_wide_as_the_terminal(columns, settings, tmp_path):
    words = [*settings, "trainer.max_steps=40", "samples.print=3", f"run_dir={tmp_path / 'run'}"]
    lines = [line.rstrip() for line in seen_on_a_terminal(words, columns=columns).splitlines()]
    steps = [line for line in lines if line.startswith("step ") and "reward" in line]
    assert steps
    assert all(re.search(r"reward \d\.\d{3}  .*\d\.\d GB", line) for line in steps)
    assert any(re.search(r"GB  .*\d+ (s|min) left$", line) for line in steps)
    assert [("━" in line or "─" in line) and ":" in line for line in steps] == [columns == 120] * len(steps)
    answers = [line for line in lines if " → " in line]
    assert len(answers) >= 3
    assert all(re.match(r" +(\d\.\d\d|-)  .+ → ", line) for line in answers)
    assert [line for line in [*steps, *answers] if len(line) > columns] == []


def test_lines_elsewhere(settings, tmp_path, rhymerl: Run):
    done = rhymerl(*settings, "trainer.max_steps=4", f"run_dir={tmp_path / 'run'}")
    assert "step 2  reward 0." in done.out
    assert "Total params" not in done.out
    assert done.err == ""
    assert "Going on from" in rhymerl(*settings, f"run_dir={tmp_path / 'run'}", "ckpt_path=last").out


def test_the_last_step_has_a_line(settings, tmp_path, rhymerl: Run):
    one_each = [*settings, "update.mini_batches=1"]
    done = rhymerl(*one_each, "trainer.max_steps=5", f"run_dir={tmp_path / 'run'}")
    assert re.findall(r"^step (\d+)  reward", done.out, re.MULTILINE) == ["1", "3", "5"]
    done = rhymerl(*one_each, "trainer.max_steps=3", f"run_dir={tmp_path / 'short'}")
    assert re.findall(r"^step (\d+)  reward", done.out, re.MULTILINE) == ["1", "3"]


def test_a_run_that_learns_nothing_says_so(settings, tmp_path, monkeypatch, caplog, rhymerl: Run):
    """The words of a run that learns something are in test_quickstart.py."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_idle.py").write_text("def reward(completion: str) -> float:\n    return 0.0\n")
    short = [*settings, "update.mini_batches=1", "trainer.max_steps=2", "rewards=my_idle.reward"]
    done = rhymerl(*short, "run_dir=run")
    assert done.code == 0
    told = "step 1: all 16 answers have the same reward (0), so nothing is learned from them. samples.jsonl shows"
    assert [told in message for message in caplog.messages] == [True]
    assert "Nothing was learned: " in done.out


def test_malformed_drafts_are_told_about_once_a_run(settings, tmp_path, monkeypatch, caplog, rhymerl: Run):
    """Though there is an engine for each evaluation, for training, and for what drafts were worth."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_bad.py").write_text(
        "from rhymerl import Draft, Drafter\n\n"
        "class Bad(Drafter):\n"
        "    def propose(self, request, context, budget):\n"
        "        return Draft(token_ids=[4], parents=[0])\n"
    )
    more = ["drafter=my_bad.Bad", "budget=fixed", "update.mini_batches=1", "trainer.max_steps=2", "run_dir=run"]
    done = rhymerl(*(each for each in settings if each != CHEAP_DRAFTS), *more)
    assert done.code == 0
    assert sum("such drafts are left out, and from now on only counted" in each for each in caplog.messages) == 1
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["spec_bad_drafts"] > 0
    assert "spec_bad_drafts" in done.out


def test_a_run_without_progress(settings, tmp_path, rhymerl: Run):
    """Lightning's summary of the model is there where it is asked for."""
    more = ["trainer.max_steps=2", "trainer.enable_progress_bar=false", "trainer.enable_model_summary=true"]
    quiet = rhymerl(*settings, *more, f"run_dir={tmp_path / 'none'}")
    assert (quiet.code, quiet.err) == (0, "")
    assert "  reward 0." not in quiet.out
    assert "Summary" in quiet.out
    assert quiet.out.count("Total params") == 1


def test_figures_in_the_closing_table():
    assert [readable(each) for each in (0.523412, 3, 14250.7, 21452, 999.9)] == [
        "0.5234",
        "3",
        "14,251",
        "21,452",
        "999.9",
    ]


def test_a_run_reads_its_prompts_once(settings, tmp_path, monkeypatch, rhymerl: Run):
    """Though it evaluates, trains and evaluates again, each of which sets its data up."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_counted_task.py").write_text(
        "from rhymerl.tasks import RunningSum\n\n"
        "class Counted(RunningSum):\n"
        "    def rows(self, split):\n"
        "        print(f'asked for {split}')\n"
        "        return super().rows(split)\n"
    )
    more = ["task=my_counted_task.Counted", "trainer.max_steps=2", f"run_dir={tmp_path / 'run'}"]
    done = rhymerl(*settings, *more)
    assert done.code == 0, done.err
    assert done.out.count("Evaluating on") == 2
    assert (done.out.count("asked for train"), done.out.count("asked for validation")) == (1, 1)
