"""Variances of runs and forks that are known by hand."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rhymerl.report import read_run
from rhymerl.report.steps import STEPS, StepFile, read_steps
from tests.benchmarks.test_benchmarks import BENCHMARKS
from tests.report.directories import make_run


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(BENCHMARKS)
    import paired_variance  # type: ignore[import-not-found]

    return paired_variance


def forked(run: Path, *, plus: float) -> Path:
    """A copy of a run whose first prompt gets so much more reward in each of its two answers."""
    fork = run.with_name(f"{run.name}-fork")
    shutil.copytree(run, fork)
    records = list(read_steps(fork / STEPS))
    file = StepFile(fork / STEPS)
    for record in records:
        if "answers" in record:
            rewards = record["answers"]["reward"]
            record["answers"]["reward"] = [each + plus * (index < 2) for index, each in enumerate(rewards)]
        file.append(record)
    return fork


def test_what_runs_share_cancels_out(benchmark: Any, tmp_path: Path) -> None:
    runs = [make_run(tmp_path / str(seed), num_steps=3, seed=seed, prompts=8) for seed in range(2)]
    for run in runs:
        assert json.loads((run / "summary.json").read_text())
    pairs = [(read_run(run), read_run(forked(run, plus=0.8))) for run in runs]
    found = benchmark.variances(pairs)
    # One of eight prompts differs by 0.8: a mean of 0.1, and a variance of 0.08 over the prompts, of whose mean it is an eighth.
    assert found["paired"] == pytest.approx(np.full((2, 3), 0.08 / 8))
    assert found["difference"] == pytest.approx(np.full(3, 0.1))
    assert found["paired_seeds"] == pytest.approx(np.zeros(3), abs=1e-12)
    firsts, seconds = (np.array([benchmark.rewards(pair[which]) for pair in pairs]) for which in (0, 1))
    by_hand = [firsts[seed].var(axis=1, ddof=1) / 8 + seconds[1 - seed].var(axis=1, ddof=1) / 8 for seed in range(2)]
    assert found["unpaired"] == pytest.approx(np.array(by_hand))
