"""A run ends with a report; what it records for it has each step once, however often it was interrupted."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from rhymerl.drafts import NOT_DRAFTED
from rhymerl.report import read_run
from rhymerl.report.steps import STEPS, read_steps
from tests.integration import programs
from tests.integration.conftest import CHEAP_DRAFTS, Run, checkpoint
from tests.report.directories import data_of

STEPS_A_PASS, NUM_PROMPTS, GROUP = 3, 10, 4
SAME = ("step", "epoch", "answers", "texts", "workers_apart")


def outline(run_dir: Path) -> list[dict[str, Any]]:
    """What a run recorded, without what tells the time."""
    return [
        {name: each[name] for name in (*SAME, "evaluation") if name in each} for each in read_steps(run_dir / STEPS)
    ]


def words_for(settings: list[str], run_dir: Path, *more: str) -> list[str]:
    """Return the words of a run in float64, with drafts; validation prompts are answered in the middle, too."""
    fixed = ["model.dtype=float64", "budget=fixed", "evaluation.every_n_steps=2", "checkpoint.every_n_steps=2"]
    return [*(each for each in settings if each != CHEAP_DRAFTS), *fixed, f"run_dir={run_dir}", *more]


@pytest.fixture
def whole(whole_dir: Path, settings: list[str], rhymerl: Run) -> Path:
    """The run directory of an uninterrupted run of six steps; made once."""
    if not whole_dir.exists():
        done = rhymerl(*words_for(settings, whole_dir))
        assert done.code == 0, done.err
        assert "report.html" in done.out
    return whole_dir


def test_the_record_is_that_of_the_run(whole: Path) -> None:
    records = list(read_steps(whole / STEPS))
    assert [each["step"] for each in records if "evaluation" in each] == [0, 2, 4, 6]
    steps = [each for each in records if "evaluation" not in each]
    assert [(each["step"], each["epoch"]) for each in steps] == [(step, (step - 1) // 3) for step in range(1, 7)]
    summary = json.loads((whole / "summary.json").read_text())
    answers = read_run(whole).answers
    assert ["facts" in each for each in steps] == [True, *[False] * 5], "where the run was started"
    assert set(steps[0]["facts"]) >= {"model", "device", "prompts", "data", "command"}
    assert steps[0]["began_at"] < steps[0]["ended_at"]
    assert answers is not None
    assert len(answers) == 2 * NUM_PROMPTS * GROUP == len(answers.texts)
    assert answers.tokens.sum() == summary["num_tokens"]
    assert answers.accepted.sum() / answers.drafted.sum() == pytest.approx(summary["spec_accept_rate"], abs=1e-4)
    assert answers.tokens.sum() / answers.passes.sum() == pytest.approx(summary["spec_accept_length"], abs=1e-4)
    for step in steps:
        assert sum(step["answers"]["reward"]) / len(step["answers"]["reward"]) == pytest.approx(
            step["metrics"]["reward"]
        )
        busy = sum(end - start for _, kind, number, start, end in step["spans"] if kind == "decode")
        assert 0 < busy <= step["metrics"]["timing_s/rollout"] + 0.01
        assert {number for _, kind, number, *_ in step["spans"] if kind == "decode"} == {step["step"] - 1}


def test_texts_are_divided_by_where_their_tokens_came_from(whole: Path) -> None:
    answers = read_run(whole).answers
    assert answers is not None
    sources = set()
    for index, text in answers.texts.items():
        assert sum(count for count, _ in text["runs"]) == len(text["text"])
        drafted = sum(count for count, source in text["runs"] if source != NOT_DRAFTED)
        assert drafted <= answers.accepted[index]  # a special token is no character
        sources |= {source for _, source in text["runs"]}
    assert NOT_DRAFTED in sources
    assert len(sources) > 1


def test_the_page_has_the_figures_of_the_run(whole: Path) -> None:
    data = data_of((whole / "report.html").read_text())
    records = [each for each in read_steps(whole / STEPS) if "evaluation" not in each]
    curves = data["metrics"][0]["curves"]
    for name, value in records[-1]["metrics"].items():
        assert curves[name][1][-1] == value, name
    assert len(data["samples"][0]["texts"]) == 2 * NUM_PROMPTS * GROUP
    assert data["timelines"][0]["rows"] == ["rank 0"]
    assert "similarity" in data["charts"]


def test_the_record_and_tensorboard_agree(whole: Path, tmp_path: Path) -> None:
    """A run that recorded nothing shows the same curves."""
    (tmp_path / "run").mkdir()
    for name in ("config.yaml", "tensorboard"):
        (tmp_path / "run" / name).symlink_to(whole / name)
    own, other = read_run(whole), read_run(tmp_path / "run")
    for name, curve in own.curves.items():
        assert list(other.curves[name].values()) == pytest.approx(list(curve.values()), rel=1e-6, nan_ok=True), name
    assert other.evaluations.keys() == own.evaluations.keys()
    found = list(other.evaluations["eval/reward"].values())
    assert found == pytest.approx(list(own.evaluations["eval/reward"].values()))


def test_killed_and_resumed(whole: Path, settings: list[str], tmp_path: Path, rhymerl: Run) -> None:
    """Killed in the second update of step 5, whose rollout nobody has recorded; the checkpoint is that of step 4."""
    words = words_for(settings, tmp_path / "run")
    process = programs.start(
        [*words, "algo={_target_: tests.integration.programs.DieInUpdate, call: 9}"], tmp_path / "output"
    )
    process.join(600)
    assert process.exitcode == -signal.SIGKILL, (tmp_path / "output").read_text()
    assert checkpoint(tmp_path / "run")["rhymerl"]["num_rollouts"] in (2, 4)
    assert not (tmp_path / "run" / "report.html").exists()
    assert rhymerl("report", str(tmp_path / "run")).code == 0, "a run that was killed has a report, too"
    done = rhymerl(*words, "ckpt_path=last")
    assert done.code == 0, done.err
    assert outline(tmp_path / "run") == outline(whole)


def test_going_on_elsewhere_records_what_comes(whole: Path, settings: list[str], tmp_path: Path, rhymerl: Run) -> None:
    path = whole / "checkpoints" / "step=4.ckpt"
    done = rhymerl(*words_for(settings, tmp_path / "run", f"ckpt_path={path}"))
    assert done.code == 0, done.err
    assert [each["step"] for each in outline(tmp_path / "run") if "answers" in each] == [5, 6]


def test_without_a_report_nothing_is_written(settings: list[str], tmp_path: Path, rhymerl: Run) -> None:
    done = rhymerl(*words_for(settings, tmp_path / "run", "report=false", "trainer.max_steps=2"))
    assert done.code == 0, done.err
    assert "report.html" not in done.out
    assert {"report.html", STEPS} & {path.name for path in (tmp_path / "run").iterdir()} == set()


def test_a_report_that_cannot_be_written_does_not_fail_the_run(
    settings: list[str], tmp_path: Path, rhymerl: Run
) -> None:
    (tmp_path / "run" / "report.html").mkdir(parents=True)
    done = rhymerl(*words_for(settings, tmp_path / "run", "trainer.max_steps=2"))
    assert done.code == 0, done.err
    assert "There is no report: " in done.out
    assert "report.html" in done.out
