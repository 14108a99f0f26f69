"""`profile=trace`: a Chrome trace of a run."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rhymerl.report.reading import read_run
from rhymerl.report.timeline import timeline_of
from tests.integration.conftest import Run

MS = 1e3  # as which two clocks may differ here


def events_of(run_dir: Path) -> list[dict[str, Any]]:
    return json.loads((run_dir / "trace.json").read_text())["traceEvents"]


@pytest.mark.parametrize("report", [pytest.param("true", marks=pytest.mark.slow), "false"])
def test_a_trace_has_steps_passes_rewards_and_updates(
    report: str, settings: list[str], rhymerl: Run, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    words = ["profile=trace", f"report={report}", "trainer.max_steps=4", "evaluation.every_n_steps=1"]
    assert rhymerl(*settings, *words, f"run_dir={run_dir}").code == 0
    events = events_of(run_dir)
    named = {(each["pid"], each["tid"]): each["args"]["name"] for each in events if each["name"] == "thread_name"}
    shown = [each for each in events if each["ph"] != "M"]
    counts = Counter((each["cat"], each["name"]) for each in shown)
    assert counts["steps", "step 1"] == counts["steps", "step 2"] == 1
    assert counts["parts", "update"] == counts["parts", "rollout"] == 2
    assert counts["rewards", "digits"] == 2 * 4 * 4  # each answer of each step; none of an evaluation
    assert all(named[each["pid"], each["tid"]] == each["cat"] for each in shown)
    steps = {each["name"]: each for each in shown if each["cat"] == "steps"}
    passes = [each for each in shown if each["cat"] == "passes"]
    assert len(passes) > 10
    # A step's end may be noted late, and its beginning with it, but nothing of it happens before the end of the step
    # before.
    end_of = {0: 0.0, **{number: steps[f"step {number}"]["ts"] + steps[f"step {number}"]["dur"] for number in (1, 2)}}
    for each in [*passes, *(each for each in shown if each["cat"] == "rewards")]:
        number = each["args"]["step"]
        assert end_of[number - 1] - MS <= each["ts"] <= end_of[number] + MS, each
    for each in (each for each in shown if each["cat"] == "parts"):
        assert -MS <= each["ts"] <= each["ts"] + each["dur"] <= end_of[2] + MS, each
    ends = {each["args"]["step"]: each["ts"] + each["dur"] for each in passes}  # of the last pass of each step
    assert all(each["ts"] >= ends[1] for each in passes if each["args"]["step"] == 2)
    assert all(each["ts"] >= 0 and each.get("dur", 0) >= 0 for each in shown)
    assert (run_dir / "report.html").exists() == (report == "true")


def test_a_resumed_run_has_each_step_once(settings: list[str], rhymerl: Run, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    assert rhymerl(*settings, "profile=trace", "trainer.max_steps=4", f"run_dir={run_dir}").code == 0
    first = run_dir / "checkpoints" / "step=1.ckpt"
    assert rhymerl("resume", str(run_dir), f"ckpt_path={first}", "trainer.max_steps=6").code == 0
    names = [each["name"] for each in events_of(run_dir) if each.get("cat") == "steps"]
    assert names == ["step 1", "step 2", "step 3"]
    passes = {each["args"]["step"] for each in events_of(run_dir) if each.get("cat") == "passes"}
    assert passes == {1, 2, 3}


def test_another_profile_is_refused(settings: list[str], rhymerl: Run, tmp_path: Path) -> None:
    done = rhymerl(*settings, "profile=flame", f"run_dir={tmp_path / 'run'}")
    assert done.code == 2
    assert "profile='flame': expected trace, or null for none" in done.err


def test_episodes_show_in_trace_timeline_and_samples(settings: list[str], rhymerl: Run, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    environment = "environment=tests.environments.worlds.Ponders"
    words = [environment, "rollout.max_turns=3", "profile=trace", "trainer.max_steps=4"]
    assert rhymerl(*settings, *words, f"run_dir={run_dir}").code == 0
    shown = [each for each in events_of(run_dir) if each["ph"] != "M"]
    waiting = [each["args"]["episodes"] for each in shown if each["ph"] == "C"]
    assert waiting[-1] == 0 == min(waiting) < max(waiting)
    waits = [each for each in shown if each["name"] == "waits for environments"]
    assert any(each["dur"] > 20 * MS for each in waits)
    assert all(each["cat"] == "worker" and each["dur"] > 0 for each in waits)
    # Whenever an engine has nothing to decode but for its environments, some episode waits.
    changes = [(each["ts"], each["args"]["episodes"]) for each in shown if each["ph"] == "C"]
    for each in (each for each in waits if each["dur"] > 20 * MS):
        middle = each["ts"] + each["dur"] / 2
        assert [count for at, count in changes if at <= middle][-1] > 0
    run = read_run(run_dir)
    timeline = timeline_of(run)
    assert timeline is not None
    assert "environment" in timeline.kinds
    assert any(run.curves["environment/idle_frac"].values())
    assert run.answers is not None
    episodes = [each for each in run.answers.texts.values() if each["turns"]]
    assert {each["finish_reason"] for each in episodes} <= {"stop", "max_turns", "length"}
    for text in episodes:
        for turn in text["turns"]:
            reply = text["text"][turn["start"] : turn["stop"]]
            assert reply.endswith("=" if turn["stop"] > turn["start"] else "")
            assert turn["waited_s"] is None or turn["waited_s"] >= 0
