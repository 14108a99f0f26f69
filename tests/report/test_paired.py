from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rhymerl.report.base import Answers, Run
from rhymerl.report.charts import sections_of
from rhymerl.report.paired import paired_difference


def run_of(rows: list[tuple[int, str, int, float]], *, name: str = "a", seed: str = "0") -> Run:
    """A run with answers (step, prompt, sample, reward)."""
    ids = sorted({prompt for _, prompt, _, _ in rows})
    columns: dict[str, Any] = {
        "step": [step for step, *_ in rows],
        "prompt": [ids.index(prompt) for _, prompt, *_ in rows],
        "sample": [sample for _, _, sample, _ in rows],
    }
    empty = np.zeros(len(rows), np.int64)
    answers = Answers(
        **{key: np.array(values) for key, values in columns.items()},
        reward=np.array([reward for *_, reward in rows]),
        change=np.zeros(len(rows)),
        epoch=empty,
        tokens=empty,
        passes=empty,
        drafted=empty,
        accepted=empty,
        is_cut=empty.astype(bool),
        prompt_ids=ids,
        texts={},
    )
    settings = {"seed": seed}
    return Run(path=Path(name), name=name, settings=settings, summary={}, curves={}, evaluations={}, answers=answers)


FIRST = [(1, "p", 0, 1.0), (1, "p", 1, 0.0), (1, "q", 0, 0.0), (2, "p", 0, 0.5), (2, "q", 0, 0.5), (3, "p", 0, 1.0)]
SECOND = [(1, "q", 0, 1.0), (1, "p", 1, 1.0), (1, "p", 0, 1.0), (2, "p", 0, 0.5), (2, "q", 0, 1.0), (2, "r", 0, 9.0)]


def test_differences_by_hand() -> None:
    """Step 1: p from 0.5 to 1, q from 0 to 1. Step 2: p by 0, q by 0.5; r in the second run only. Step 3 in one."""
    found = paired_difference(run_of(FIRST), run_of(SECOND))
    assert found is not None
    assert [*found.steps] == [1, 2]
    assert found.mean.tolist() == [0.75, 0.25]
    # The variance of (0.5, 1) is 0.125, of (0, 0.5) too; of a mean over two prompts half of it.
    assert found.variance.tolist() == [0.0625, 0.0625]
    mean, half = found.overall
    assert (mean, half) == (0.5, pytest.approx(1.96 * np.sqrt(0.125) / 2))


def test_runs_with_other_noise_are_not_paired() -> None:
    assert paired_difference(run_of(FIRST), run_of(SECOND, seed="1")) is None
    assert paired_difference(run_of(FIRST), run_of([(1, "r", 0, 1.0), (1, "s", 0, 1.0)])) is None


def test_what_runs_have_in_common_cancels_out() -> None:
    """Prompts differ much in difficulty, and little between the runs."""
    draws = np.random.default_rng(0)
    hard, noise = draws.normal(size=50), 0.1 * draws.normal(size=(2, 50))
    rows = [[(1, str(index), 0, hard[index] + noise[run, index]) for index in range(50)] for run in (0, 1)]
    found = paired_difference(run_of(rows[0]), run_of(rows[1]))
    assert found is not None
    unpaired = sum(np.var([reward for *_, reward in run], ddof=1) / 50 for run in rows)
    assert unpaired > 20 * found.variance[0]


def test_a_report_of_two_runs_shows_them() -> None:
    runs = [run_of(FIRST), run_of(SECOND, name="b")]
    (chart,) = (chart for charts in sections_of(runs).values() for chart in charts if chart.id.startswith("paired"))
    assert chart.title == "Paired difference: b - a"
    assert "Over all 2 steps +0.5000 ± 0.3465." in chart.caption
    band, line = chart.series
    assert [*line.y] == [0.75, 0.25]
    assert band.low is not None
    assert [(low + high) / 2 for low, high in zip(band.low, band.y, strict=True)] == pytest.approx([0.75, 0.25])
    assert sections_of(runs[:1]) == {}
