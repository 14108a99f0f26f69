"""What charts show of a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from rhymerl.report import read_run
from rhymerl.report.base import Run
from rhymerl.report.charts.history import history_charts
from rhymerl.report.charts.learning import learning_charts
from tests.report.directories import data_of, make_run, metrics, page_of


def test_tokens_from_drafts_and_time_add_up(run: Path, tmp_path: Path):
    charts = data_of(page_of(run, out=tmp_path / "a.html"))["charts"]
    answers = read_run(run).answers
    assert answers is not None
    for step in range(1, 7):
        drafted = sum(series["y"][step - 1] for series in charts["origins-0"]["series"])
        here = answers.step == step
        assert drafted == pytest.approx(answers.accepted[here].sum() / answers.tokens[here].sum())
    parts = {series["name"]: series["y"] for series in charts["parts-0"]["series"]}
    assert list(parts) == ["rollout", "update", "the rest"]
    assert [sum(values) for values in zip(*parts.values(), strict=True)] == pytest.approx([9 - 0.001] * 6)


def test_the_difference_of_sampling_and_training_is_stacked_by_source(run: Path, tmp_path: Path):
    other = make_run(tmp_path / "other", seed=1)
    charts = data_of(page_of(run, other, out=tmp_path / "a.html"))["charts"]
    assert [charts[f"gap-{number}"]["title"] for number in (0, 1)] == [
        f"Sampling against training: {name}" for name in ("mine", "other")
    ]
    precision, truncation = charts["gap-0"]["series"]
    assert {precision["kind"], truncation["kind"]} == {"area"}
    assert (precision["name"], precision["y"]) == ("precision", [0.01 * step for step in range(1, 7)])
    assert (truncation["name"], truncation["y"]) == ("truncation, replayed", [0.2] * 6)


def test_a_source_that_some_steps_lack_is_0_there():
    curves = {
        f"sampling/sampling_logp_difference/{name}": dict.fromkeys(steps, 0.5)
        for name, steps in {"mean": [1, 2, 3], "age": [1, 2, 3], "truncation": [2, 3]}.items()
    }
    run = Run(path=Path("a"), name="a", settings={}, summary={}, curves=curves, evaluations={})
    (chart,) = (each for each in learning_charts([run]) if each.id == "gap-0")
    assert [(each.name, each.y) for each in chart.series] == [
        ("age of the weights", [0.5, 0.5, 0.5]),
        ("truncation, replayed", [0.0, 0.5, 0.5]),
    ]


def test_steps_in_which_nothing_came_from_the_history_have_no_age():
    age, share = ((0.0, 0.0, 0.5), (0.0, 0.25, 0.5))
    curves = {
        name: dict(zip([1, 2, 3], values, strict=True))
        for name, values in {"history/hit_epoch_age": age, "spec/accepted_history_frac": share}.items()
    }
    run = Run(path=Path("a"), name="a", settings={}, summary={}, curves=curves, evaluations={})
    (chart,) = (each for each in history_charts([run]) if each.series)
    assert (chart.series[0].x, chart.series[0].y) == ([2, 3], [0.0, 0.5])


def test_the_timeline_says_who_did_what(run: Path, tmp_path: Path):
    (timeline,) = data_of(page_of(run, out=tmp_path / "a.html"))["timelines"]
    assert timeline["rows"] == ["rank 0", "rank 1"]
    of_first = [each for each in timeline["bars"] if each["step"] == 1 and each["kind"] != "weights"]
    found = {(each["row"], each["kind"]): (each["start_s"], each["end_s"]) for each in of_first}
    expected = {
        (0, "rollout"): (0, 3),
        (1, "rollout"): (0, 4),
        (0, "update"): (9 - 3.001, 9),
        (1, "update"): (9 - 3.001, 9),
    }
    assert found.keys() == expected.keys()
    assert all(found[key] == pytest.approx(expected[key]) for key in expected)
    ahead = [each for each in timeline["bars"] if each["kind"] == "ahead"]
    assert [each["step"] for each in ahead] == [2, 3, 4, 5, 6, 7]


def test_drafts_of_an_engine_that_counts_no_positions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """SGLang's verification counts accepted tokens alone."""
    known = {name: value for name, value in metrics(1).items() if not name.startswith("spec/accept_rate_pos_")}
    monkeypatch.setattr("tests.report.directories.metrics", lambda step: known)
    data = data_of(page_of(make_run(tmp_path / "mine"), out=tmp_path / "a.html"))
    assert "rollout-spec_accept_length" in data["charts"]
    assert not any("acceptance-position" in name for name in data["charts"])
