"""Every benchmark runs, at its smallest, and ends in the one JSON line that it returns."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import record
from benchmarks.emulation import headline
from benchmarks.emulation.course import Course

Run = Callable[..., dict[str, Any]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a benchmark as its command would, in this process; its theme is its name, unless another is given."""

    def run(name: str, *words: str, theme: str | None = None) -> dict[str, Any]:
        result: dict[str, Any] = importlib.import_module(f"benchmarks.{name}").main(list(words))
        assert json.loads(capsys.readouterr().out.splitlines()[-1]) == result
        assert result["benchmark"] == (theme or name.rpartition(".")[2])
        assert set(result["environment"]) > {"processor", "load", "torch", "commit"}
        return result

    return run


def test_an_option_is_of_the_type_of_its_default() -> None:
    own = {"repeats": 3, "minutes": 1.0, "rows": [1, 2], "model": str, "in_turns": False, "server": []}
    parser = record.options(None, settings=True, **own)
    words = ["--minutes", "2", "--rows", "4", "--model", "a", "--in-turns", "--server", "b=c", "--", "x=1"]
    for given, expected in (([], {**own, "model": None}), (words, {"minutes": 2.0, "rows": [4], "model": "a"})):
        found = vars(parser.parse_args(given))
        assert {name: found[name] for name in expected} == expected
    assert (found["in_turns"], found["server"], found["settings"], found["repeats"]) == (True, ["b=c"], ["x=1"], 3)
    with pytest.raises(SystemExit):
        parser.parse_args(["--rows"])


def test_draw_kernel_says_what_it_needs(run: Run) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with pytest.raises(SystemExit, match="needs a CUDA device"):
        run("gpu.draw_kernel")


@pytest.mark.slow
def test_tournament_has_a_row_for_each_rule(run: Run) -> None:
    rows = run("scheduling.tournament", "--workloads", "SmolLM2's sums", "--seeds", "2", "--steps", "6")["rows"]
    found = {(row["rule"], row["steps"]): row for row in rows}
    assert len(found) == len(rows) == 18
    assert found["FIFO", "on-policy"]["tokens"] == {"median": 1, "min": 1, "max": 1}
    assert found["Laminar's repack", "one step off"]["oldest"] == 1
    assert all(row["tokens"]["median"] <= 1.001 * row["bound"] for row in rows)


@pytest.mark.slow
def test_first_runs_have_the_rewards_of_their_steps(run: Run, tmp_path: Path) -> None:
    words = ["task.train_size=8", "task.validation_size=4", "data.prompts_per_step=4", "rollout.group_size=2"]
    settings = [*words, "rollout.max_tokens=16", "trainer.max_steps=2"]
    (row,) = run("learning.first_runs", "--configs", "quickstart", "--out", str(tmp_path), *settings)["rows"]
    assert (row["config"], row["steps"], len(row["reward"])) == ("quickstart", 2, 2)
    assert 0 <= row["before"] <= 1 >= row["after"] >= 0
    assert len(list(tmp_path.iterdir())) == 2


def test_draft_rules_say_what_is_accepted_where_answers_come_again(run: Run, tmp_path: Path) -> None:
    answers = {"a": [1, 2, 3, 4, 5], "b": [11, 12, 13, 14, 15, 16]}
    lines = [
        {"epoch": epoch, "prompt_id": name, "sample": 0, "prompt_tokens": [answer[-1] + 10], "response_tokens": answer}
        for epoch in (0, 1)
        for name, answer in answers.items()
    ]
    ends = {"reward": 1.0, "finish_reason": "stop"}
    (tmp_path / "trace.jsonl").write_text("".join(json.dumps({**line, **ends}) + "\n" for line in lines))
    result = run("drafting.draft_rules", str(tmp_path / "trace.jsonl"), "--nodes", "4")
    # Nothing is known in the first epoch. In the second, 4 drafted tokens and the next one are an answer, or leave one
    # token of it: 11 tokens in 3 passes. The paper's rule looks for 3 tokens, the prompt's among them, so it drafts in
    # the third pass of each: 6 passes.
    by_rule = {row["rule"]: [row["1"], row["2"]] for row in result["rows"]}
    assert by_rule == {"rhymerl": [1, 3.667], "n-gram": [1, 1], "longest match": [1, 1.833], "oracle": [1, 3.667]}
    accepted = result["courses"]["trace"]["accepted"]["2"]
    assert accepted["history"] == accepted["at 1"] == accepted["at 4"] == 1
    assert accepted["own"] == accepted["siblings"] == accepted["others"] == accepted["at 8"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("task", ["echo", "running_sum"])
def test_comparisons_with_trl_run_our_side_alone(run: Run, task: str) -> None:
    words = ("--prompts", "2", "--group-size", "2", "--max-tokens", "4", "--reward-where", "main", "--threads", "1")
    words += ("--task", task, "--seeds", "1", "--steps", "3", "--warm-up", "1")
    result = run("against_trl.compare", *words, theme=f"trl_{task}")
    assert result["speedup"] is None
    (row,) = result["rows"]
    assert row["side"] == "rhymerl"
    assert 0 < row["rollout_s"]["median"] < row["step_s"]["median"]


@pytest.mark.slow
def test_layer_kinds_have_a_row_a_model_and_keys_bounded_by_a_window(run: Run) -> None:
    words = ("--rows", "1", "--tokens", "15", "--answers", "60", "200", "--window", "16", "--repeats", "1")
    llama, hybrid, short, long = run("drafting.layer_kinds", *words, "--threads", "1")["rows"]
    assert (llama["model"], hybrid["model"], llama["over llama"]["median"]) == ("llama", "hybrid", 1)
    assert 45 < llama["million"] < 55 > hybrid["million"] > 45
    assert llama["tokens a pass"] > 3 < hybrid["tokens a pass"]  # half of the drafts
    assert long["slots with"] == short["slots with"] < short["slots without"] < long["slots without"]


@pytest.mark.slow
def test_guard_compares_this_tree_with_a_commit(run: Run) -> None:
    rows = run("regression.guard", "--base", "HEAD", "--repeats", "1", "--only", "rollout", "--limit", "1000")["rows"]
    assert [row["what"] for row in rows] == [f"rollout {n} rows, pass {k}" for n in (1, 8, 64) for k in (1, 3)]
    assert all(row["verdict"] == "ok" and row["ratio"]["median"] > 0 for row in rows)


@pytest.mark.slow
def test_paired_runs_has_a_row_a_pair_and_one_of_all(run: Run) -> None:
    sizes = ("task.train_size=4", "task.validation_size=2", "data.prompts_per_step=2", "rollout.group_size=2")
    rows = run("drafting.paired_runs", *sizes, "rollout.max_tokens=8", "trainer.max_steps=4", "--repeats", "1")["rows"]
    assert [row["pair"] for row in rows] == [0, "all"]
    for row in rows:
        assert row["equal_steps"] == 4
        assert row["had"] == pytest.approx(row["plain_s"] / row["own_s"], rel=0.02)
        assert row["step"] == pytest.approx(row["plain_step_s"] / row["step_s"], rel=0.02)


@pytest.mark.slow
def test_longer_task_has_rows_for_each_number_of_running_requests(run: Run) -> None:
    sizes = ("task.train_size=4", "task.validation_size=2", "data.prompts_per_step=2", "rollout.group_size=2")
    words = ("--config", "quickstart", "--running", "2", "4", "--from-epoch", "2", "--every", "1")
    result = run("drafting.longer_task", *sizes, "rollout.max_tokens=16", "trainer.max_steps=6", *words)
    assert [(row["running"], row["epoch"]) for row in result["rows"]] == [(n, e) for n in (2, 4) for e in (2, 3, "all")]
    assert set(result["reward_by_epoch"]) == {"1", "2", "3"}
    for row in result["rows"]:
        assert row["had"] == pytest.approx(row["plain_ms_per_token"] / row["ms_per_token"], rel=0.05)
        assert row["share"] == pytest.approx(row["had"] / row["allowed"], rel=0.01)
        assert row["allowed"] >= 1.0


@pytest.mark.slow
def test_headline_has_a_row_for_each_way_on_a_clock_of_its_own(run: Run, tmp_path: Path) -> None:
    costs = tmp_path / "steep.json"  # where each node has its price
    costs.write_text(json.dumps({"costs": [[1, 0.01], [512, 0.5]], "context_s_per_token": 1e-6}))
    words = ["--steps", "3", "--epoch-steps", "1", "--prompts", "2", "--workers", "2", "--held-out", "2"]
    words += [
        "--emulate",
        str(costs),
        "--judged",
        "3",
        "--rows",
        "history_tree, sorted, draft",
        "history_tree, packed, draft, one width",
    ]
    settings = ["rollout.group_size=2", "rollout.max_tokens=24", "trainer.enable_progress_bar=false"]
    rows = run("emulation.headline", "--max-running", "4", *words, "--", *settings)["rows"]
    assert [row["row"] for row in rows] == [
        "none, fifo, off",
        "none, fifo, colocated",
        "none, fifo, one step off",
        "history_tree, sorted, draft",
        "history_tree, packed, draft, one width",
    ]
    barrier, colocated, one_step_off, ours, uniform = rows
    assert [row["pipeline"] == "colocated" for row in rows] == [False, True, False, False, False]
    assert colocated["over_colocated"] == 1
    assert colocated["update_s"] == pytest.approx(barrier["update_s"] / 2, abs=1e-3), "four devices instead of two"
    assert barrier["over_barrier"] == one_step_off["over_one_step_off"] == 1
    assert barrier["over_one_step_off"] == pytest.approx(1 / one_step_off["over_barrier"], rel=1e-2)
    assert [row["staleness"] > 0 for row in rows] == [False, False, True, False, False]
    assert uniform["lost"]["padding"] > 0 == ours["lost"]["padding"]
    assert ours["held_out"] == uniform["held_out"] == barrier["held_out"], (
        "drafts and the order of work have changed the tokens"
    )
    assert [len(row["held_out"]) for row in rows] == [4] * 5, "the start and each epoch"
    assert ours["tokens_a_pass"] > 1
    assert barrier["lost"]["update"] == pytest.approx(barrier["update_frac"], abs=0.05), (
        "nobody decodes during an update, but for the end of a pass"
    )
    for row in rows:
        assert all(0 <= part < 1 for part in row["lost"].values()), str(row["lost"])
        assert sum(row["lost"].values()) < 1
        assert row["bound"] >= row["over_barrier"] * 0.99


def test_a_row_that_there_is_not_is_refused(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run("emulation.headline", "--rows", "none, lifo, off")
    assert "no row is called 'none, lifo, off'" in capsys.readouterr().err


def test_fewer_steps_than_two_epochs_are_refused(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("emulation.headline", "emulation.headline_settings"):
        with pytest.raises(SystemExit):
            run(name, "--steps", "7", "--epoch-steps", "4")
        assert "--steps: 7 are less than two epochs of 4" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([0.1, 0.2, 0.3, 0.4, 0.5], 2.0),  # the same rewards in half the time: 0.25 is reached at 30 and at 15
        ([0.3, 0.2, 0.1, 0.1, 0.1], 3.0),
        ([0.2, 0.2, 0.2, 0.2, 0.2], None),  # never
    ],
)
def test_time_to_a_reward_by_hand(rewards: list[float], expected: float | None) -> None:
    barrier, ours = Course(0.0, 0.0), Course(0.0, 0.0)
    barrier.metrics, barrier.ends = (
        [{"reward": each} for each in (0.1, 0.2, 0.3, 0.4, 0.5)],
        [10.0, 20.0, 30.0, 40.0, 50.0],
    )
    ours.metrics, ours.ends = [{"reward": each} for each in rewards], [5.0, 10.0, 15.0, 20.0, 25.0]
    assert headline.to_reward(ours, barrier, window=2) == expected


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([0.0, 0.1, 0.2, 0.3, 0.4], 2.0),  # the same in half the time: 0.36 at 36 and at 18
        ([0.0, 0.2, 0.5, 0.3, 0.5], 4.0),  # 0.2 at 5, then 0.4 twice: 0.36 at 5 + 5 * 0.8 = 9
        ([0.0, 0.1, 0.2, 0.2, 0.2], None),
    ],
)
def test_time_to_a_held_out_reward_by_hand(rewards: list[float], expected: float | None) -> None:
    barrier, ours = Course(0.0, 0.0), Course(0.0, 0.0)
    barrier.held_out, barrier.ends = [0.0, 0.1, 0.2, 0.3, 0.4], [10.0, 20.0, 30.0, 40.0]
    ours.held_out, ours.ends = rewards, [5.0, 10.0, 15.0, 20.0]
    assert headline.to_held_out(ours, barrier) == expected


SMALL_RUN = ["--epoch-steps", "1", "--prompts", "2", "--workers", "2", "--held-out", "2", "--max-running", "4"]
SMALL_SETTINGS = ["rollout.group_size=2", "rollout.max_tokens=24", "trainer.enable_progress_bar=false"]


@pytest.mark.slow
def test_headline_settings_has_the_main_rows_of_each_setting(run: Run) -> None:
    words = ["--steps", "2", "--only", "32B on four H100", *SMALL_RUN, "--", *SMALL_SETTINGS]
    rows = run("emulation.headline_settings", *words)["rows"]
    assert {row["setting"] for row in rows} == {"32B on four H100"}
    assert rows[0]["over_barrier"] == 1
    assert len(rows) == 8


@pytest.mark.slow
def test_emulation_is_compared_with_the_same_run_on_this_machine(run: Run) -> None:
    words = ["--steps", "3", "--epoch-steps", "1", "--prompts", "2", "--max-running", "4", "--repeats", "1"]
    settings = ["rollout.group_size=2", "rollout.max_tokens=24", "trainer.enable_progress_bar=false"]
    result = run("emulation.emulation_check", *words, "--", *settings)
    assert [row["drafter"] for row in result["rows"]] == ["none", "paper", "history_tree"]
    assert all(row["emulated_seconds"]["median"] > 0 for row in result["rows"])
    assert result["rows"][0]["flattered"] == {"median": 1, "min": 1, "max": 1}
    tokens, seconds = zip(*result["curve"], strict=True)
    assert list(seconds) == sorted(seconds)
    assert tokens[0] >= 1
