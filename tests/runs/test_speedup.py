"""What a run says that drafts were worth."""

from __future__ import annotations

import json
from dataclasses import asdict

import numpy as np
import pytest

from rhymerl.runs.summary import Speedup, SpeedupTotals, _student_t


def report(speedup: float, *, plain: float, drafted: float, share: float = 1.0) -> dict[str, float]:
    return {
        "rollout/speedup": speedup,
        "rollout/plain_pass_error": plain,
        "rollout/drafted_pass_error": drafted,
        "rollout/drafted_pass_frac": share,
    }


def steps(
    speedups: list[float], *, plain: list[float], drafted: list[float], share: float = 1.0, rollout_s: float = 2.0
) -> SpeedupTotals:
    totals = SpeedupTotals()
    for speedup, one, other in zip(speedups, plain, drafted, strict=True):
        totals.count(report(speedup, plain=one, drafted=other, share=share), rollout_s=rollout_s)
    return totals


def test_the_figure_is_of_all_rollouts() -> None:
    """A report counts by what the rollouts since the last one took, and those that no report is of do not count."""
    totals = steps([1.0], plain=[1.0], drafted=[0.0], rollout_s=3.0)
    totals.count({}, rollout_s=0.75)
    totals.count(report(2.0, plain=0.0, drafted=1.0), rollout_s=0.25)
    totals.count({}, rollout_s=100.0)
    assert totals.speedup == Speedup(ratio=1.25)
    assert "Too short" in str(totals.speedup)
    assert (totals.errors, totals.num_plain) == ([], 1), (
        "without drafts there is none, and without plain passes none is known"
    )


def test_without_drafts_there_is_none() -> None:
    assert SpeedupTotals().speedup is None


@pytest.mark.parametrize("reports", [3, 5, 7, 8, 12, 30])
def test_the_interval_covers_what_is_true(reports: int) -> None:
    """Of 400 runs, about 95 % have the true figure in their interval.

    Costs are known to 4 % a report, and a run's have a common error of 3.5 %. The machine itself is at times half as
    fast.
    """
    rng, covered = np.random.default_rng(0), 0
    for _ in range(400):
        plain, drafted = np.exp(0.04 * rng.standard_normal((2, reports))) * rng.choice([1.0, 2.0], reports)
        # A mean error of passes without drafts is one of the figure, too.
        error = np.log(plain).mean() - np.log(drafted).mean() + 0.05 * rng.standard_normal()
        found = steps([1.5 * float(np.exp(error))] * reports, plain=list(plain), drafted=list(drafted)).speedup
        assert found is not None
        assert found.low is not None
        assert found.high is not None
        covered += found.low <= 1.5 <= found.high
    assert 0.9 <= covered / 400 <= (0.99 if reports > 7 else 1)


def test_what_was_sampled_without_drafts_is_certain() -> None:
    """Where drafts had a tenth of the time, what they cost is a tenth as uncertain."""
    rng = np.random.default_rng(0)
    plain, drafted = (list(np.exp(0.1 * rng.standard_normal(20))) for _ in range(2))
    some, all_ = (steps([1.0] * 20, plain=plain, drafted=drafted, share=share).speedup for share in (0.1, 1.0))
    assert np.log(some.high) == pytest.approx(0.1 * np.log(all_.high))


def test_reports_without_drafts_do_not_hide_how_uncertain_the_others_are() -> None:
    """Two thirds of the reports had none: the figure is a third as uncertain as that of the rest, not certain."""
    rng = np.random.default_rng(0)
    plain, drafted = (list(np.exp(0.1 * rng.standard_normal(20))) for _ in range(2))
    rest = steps([1.4] * 20, plain=plain, drafted=drafted)
    mixed = SpeedupTotals(**asdict(rest))
    for _ in range(40):
        mixed.count(report(1.4, plain=1.0, drafted=0.0, share=0.0), rollout_s=2.0)
    assert np.log(mixed.speedup.high / 1.4) == pytest.approx(np.log(rest.speedup.high / 1.4) / 3)
    few = steps([1.4] * 2, plain=plain[:2], drafted=drafted[:2])
    for _ in range(40):
        few.count(report(1.4, plain=1.0, drafted=0.0, share=0.0), rollout_s=2.0)
    assert "Too short" in str(few.speedup)


def test_a_machine_that_was_busy_for_a_while_does_not_widen_it() -> None:
    quiet = [1.0, 1.01, 0.99, 1.02, 0.98, 1.0, 1.01, 0.99, 1.0]
    busy = [*quiet[:-1], 9.0]
    found = [steps([1.4] * 9, plain=each, drafted=quiet[::-1]).speedup for each in (quiet, busy)]
    assert found[1].high / found[1].low < 1.5 * found[0].high / found[0].low


@pytest.mark.parametrize(
    ("speedup", "words"),
    [
        (Speedup(ratio=1.4, low=1.36, high=1.44), "Drafts made rollouts 1.40 times as fast (95 % interval 1.36 to 1.44)"),
        (Speedup(ratio=0.9, low=0.88, high=0.92), "Drafts made rollouts 0.90 times as fast (95 % interval 0.88 to 0.92)"),
        (Speedup(ratio=1.0, low=0.98, high=1.02), "Drafts made rollouts 1.00 times as fast (95 % interval 0.98 to 1.02)"),
        (Speedup(ratio=1.1, low=0.8, high=1.5), "Too short a run to tell what drafts were worth: 95 % interval 0.80 to 1.50"),
        (Speedup(ratio=1.1), "Too short a run to tell what drafts were worth"),
    ],
)  # fmt: skip
def test_what_is_said(speedup: Speedup, words: str) -> None:
    assert str(speedup) == words


def test_a_resumed_run_has_the_figure_of_the_whole() -> None:
    whole = steps([1.1, 1.2, 1.3, 1.4], plain=[1.0, 1.1, 0.9, 1.0], drafted=[1.0, 1.0, 1.1, 0.9])
    state = json.loads(json.dumps(asdict(whole)))
    assert SpeedupTotals(**state).speedup == whole.speedup


@pytest.mark.parametrize(("degrees", "quantile"), [(2, 4.303), (3, 3.182), (5, 2.571), (10, 2.228), (100, 1.984)])
def test_students_quantile(degrees: int, quantile: float) -> None:
    assert _student_t(degrees) == pytest.approx(quantile, rel=0.035)
