"""The progress of long commands adds up, and is shown on a terminal."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from rhymerl.bench.drafter import DrafterBench
from rhymerl.bench.passes import CostsBench
from rhymerl.bench.rollout import RolloutBench
from rhymerl.config import compose
from rhymerl.history.traces import TraceRecord, TraceWriter
from rhymerl.progress import ProgressBar
from rhymerl.report import write_report
from rhymerl.runs.fit import evaluate, fit
from rhymerl.runs.generate import generate
from rhymerl.runs.judging import replay_trace
from rhymerl.simulation.comparison import compare
from tests.integration.test_progress import seen_on_a_terminal
from tests.report.directories import make_run

TINY = ["task.train_size=1", "rollout.group_size=2", "concurrency=[1]", "rollout.max_tokens=24"]


class Counting(ProgressBar):
    """Every stage: its words, its total, and how much of it was done."""

    def __init__(self) -> None:
        self.stages: list[list[object]] = []
        self.is_open = False

    def begin(self, words: str, total: int = 0) -> None:
        assert not self.is_open
        self.stages.append([words, total, 0])
        self.is_open = True

    def advance(self, number: int = 1) -> None:
        if self.is_open:
            self.stages[-1][2] += number  # type: ignore[operator]

    def end(self) -> None:
        self.is_open = False

    def check(self, *expected: tuple[str, int]) -> None:
        assert not self.is_open
        assert [tuple(each) for each in self.stages] == [(words, total, total) for words, total in expected]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    with TraceWriter(path) as writer:
        writer.write(
            TraceRecord(
                epoch=epoch,
                prompt_id="a",
                sample=sample,
                prompt_tokens=np.array([1, 2], np.int32),
                response_tokens=np.arange(3, 9, dtype=np.int32),
                reward=1.0,
                finish_reason="stop",
            )
            for epoch in range(3)
            for sample in range(2)
        )
    return path


def test_replay(trace: Path) -> None:
    progress = Counting()
    config = compose("replay", ["from_epoch=1"])
    config.trace = str(trace)
    replay_trace(config, progress=progress)
    progress.check(("answers replayed", 2 * 4))


def test_simulate() -> None:
    progress = Counting()
    compare(compose("simulate", ["workers=2", "steps=8", "warm_up=1", "seeds=2"]), progress=progress)
    progress.check(("steps with seed 0, 1 of 2 seeds", 30), ("steps with seed 1, 2 of 2 seeds", 30))


def test_bench() -> None:
    progress = Counting()
    RolloutBench(compose("bench_rollout", [*TINY, "epochs=2", "pairs=1"])).run(progress)
    tokens = sum(1 + nodes for nodes in (0, 1, 2, 4, 8, 16, 32)) * 3 * 15
    progress.check(("epochs of history", 2), ("tokens in passes", tokens), ("rounds with 1 running", 2))
    progress = Counting()
    CostsBench(compose("bench_costs", [*TINY, "measure.passes=4", "measure.rounds=2", "measure.nodes=[0,3]"])).run(
        progress
    )
    progress.check(("tokens in passes", (1 + 4) * 2 * 7))
    progress = Counting()
    words = ["answers=2", "tokens=220", "batch=4", "siblings=2", "repeats=3"]
    DrafterBench(compose("bench_drafter", words)).run(progress)
    progress.check(("indexes built", 3), ("proposals", 5))


def test_report(tmp_path: Path) -> None:
    progress = Counting()
    write_report([make_run(tmp_path / name) for name in ("a", "b")], tmp_path / "a.html", progress=progress)
    assert progress.stages == [["steps read", 0, 2 * 6], ["drawing the page", 0, 0]]


def test_rollouts(model_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "1+2=?\\n"}\n{"prompt": "3+4=?\\n"}\n')
    progress = Counting()
    words = [f"model.path={model_dir}", f"data.prompts={tmp_path / 'prompts.jsonl'}", "data.samples=3", "passes=2"]
    generate(compose("rollout", [*words, "rollout.max_tokens=8", f"out={tmp_path / 'out.jsonl'}"]), progress=progress)
    progress.check(("answers of epoch 0", 6), ("answers of epoch 1", 6))


class Watching(ProgressBar):
    """What stands behind the count with each answer."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.words = str

    def note(self, words: Callable[[], str]) -> None:
        self.words = words

    def advance(self, number: int = 1) -> None:
        self.seen.append(self.words())


@pytest.mark.parametrize("environment", [None, "tests.environments.worlds.Ponders"])
def test_episodes_that_wait_are_counted_beside_answers(
    model_dir: Path, tmp_path: Path, environment: str | None
) -> None:
    progress = Watching()
    words = [f"model.path={model_dir}", "data.prompts=null", "task=running_sum", "task.train_size=4", "data.samples=4"]
    words += ["rollout.max_tokens=64", "rollout.stop_token_ids=[2,3,4,5,6]", "passes=1", "deterministic=false"]
    words += [] if environment is None else [f"environment={environment}"]
    generate(compose("rollout", [*words, f"out={tmp_path / 'out.jsonl'}"]), progress=progress)
    waiting = [int(number) for number in re.findall(r", (\d+) wait for replies", " ".join(progress.seen))]
    assert len(waiting) == (16 if environment else 0)
    assert len(progress.seen) == 16
    if environment:
        assert 0 < max(waiting) < 16
        assert waiting[-1] == 0


def test_evaluations(settings: list[str], tmp_path: Path) -> None:
    words = [*settings[2:], f"run_dir={tmp_path / 'run'}", "trainer.max_steps=2", "evaluation.samples=3"]
    progress = Counting()
    fit(compose("quickstart", words), progress=progress)
    whole = ("answers of the evaluation", 12)
    progress.check(whole, whole)
    progress = Counting()
    evaluate(compose("quickstart", [*words, "ckpt_path=last"]), progress=progress)
    progress.check(whole)


def test_it_is_seen_on_a_terminal(settings: list[str], trace: Path, tmp_path: Path) -> None:
    shown = seen_on_a_terminal([*settings, "trainer.max_steps=4", f"run_dir={tmp_path / 'run'}"])
    assert "rhymerl fit: reading the settings ..." in shown
    assert re.search(r"^answers of the evaluation: 0 of 4$", shown, re.MULTILINE)
    shown = seen_on_a_terminal(["replay", str(trace)])
    assert "answers replayed: 0 of 12" in shown
    assert "predicted speed-up" in shown
