"""`rhymerl rollout` on files: the answers are the same whatever drafts them, and whatever is wrong costs one line."""

from __future__ import annotations

import gzip
import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rhymerl.history.traces import TraceRecord, read_trace
from rhymerl.testing import tiny_policy
from tests.integration import programs
from tests.integration.conftest import Run

PROMPTS = [{"prompt": f"{a}+{b}=?\n", "answer": str(a + b)} for a, b in ((1, 2), (3, 45), (67, 8), (9, 10), (1, 2))]
LAST = 2  # of three passes


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a model, prompts and some things that are neither."""
    path = tmp_path_factory.mktemp("place")
    tiny_policy(context=128, peaked=5.0).save(path / "model")
    (path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    (path / "broken.jsonl").write_text("{")
    (path / "empty.jsonl").write_text("")
    (path / "folder").mkdir()
    (path / "there.jsonl").write_text("mine\n")
    return path


@pytest.fixture(autouse=True)
def inside(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(index)


def words(out: str | Path, *more: str) -> list[str]:
    """Later settings replace earlier ones."""
    chosen = {
        word.partition("=")[0]: word
        for word in (
            "model.path=model",
            "data.prompts=prompts.jsonl",
            "passes=3",
            "seed=0",
            "dtype=float64",
            "rollout.max_tokens=48",
            "rollout.temperature=0.5",
            f"out={out}",
            *more,
        )
    }
    return ["rollout", *chosen.values()]


def recorded(rhymerl: Run, out: Path, *more: str) -> tuple[list[TraceRecord], dict[str, Any]]:
    """The records and what `--json` says."""
    done = rhymerl(*words(out, *more), "--json")
    assert done.code == 0, done.err
    return list(read_trace(out)), json.loads(done.out)


def assert_same_records(ours: list[TraceRecord], plain: list[TraceRecord]) -> None:
    assert len(ours) == len(plain)
    for one, two in zip(ours, plain, strict=True):
        for name in ("epoch", "prompt_id", "sample", "reward", "finish_reason"):
            assert getattr(one, name) == getattr(two, name)
        assert one.prompt_tokens.tolist() == two.prompt_tokens.tolist()
        assert one.response_tokens.tolist() == two.response_tokens.tolist()
    off = np.abs(np.concatenate([one.logprobs - two.logprobs for one, two in zip(ours, plain, strict=True)]))
    assert off.max() < 1e-6  # norms go through float32 (docs/correctness.md), and so ...
    assert np.quantile(off, 0.99) < 1e-9  # ... one in thousands is a rounding of that apart


def test_the_same_answers_from_every_drafter(rhymerl: Run, tmp_path: Path) -> None:
    plain, said = recorded(rhymerl, tmp_path / "none.jsonl", "drafter=none")
    assert said["spec_accept_length"] == 1
    by_pass = {}
    for words in ("drafter=ngram", "drafter=history_tree", "drafter=history_tree drafter.window=0"):
        ours, with_drafts = recorded(rhymerl, tmp_path / f"{words}.jsonl", *words.split(), "debug=true")
        assert_same_records(ours, plain)
        assert with_drafts["tokens"] == said["tokens"]
        assert with_drafts["spec_accept_rate"] > 0
        assert with_drafts["spec_accept_length"] > 1
        by_pass[words] = [each["spec_accept_length"] for each in with_drafts["by_pass"]]
    with_history, without = list(by_pass.values())[1:]
    assert with_history[0] == without[0]
    assert with_history[LAST] > without[LAST]


def test_what_is_recorded(rhymerl: Run, tmp_path: Path) -> None:
    records, said = recorded(rhymerl, tmp_path / "a.jsonl", "data.samples=2")
    indices = [(each.epoch, each.prompt_id, each.sample) for each in records]
    assert len(indices) == len(set(indices)) == 3 * len(PROMPTS) * 2
    assert [each.epoch for each in records] == sorted(each.epoch for each in records)
    assert {each.epoch for each in records} == {0, 1, 2}
    assert all(each.reward == 0.0 for each in records)
    assert all(each.logprobs is not None and (each.logprobs <= 0).all() for each in records)
    by_pass = [[each.response_tokens.tolist() for each in records if each.epoch == epoch] for epoch in range(3)]
    assert by_pass[0] != by_pass[1] != by_pass[2]
    assert said["tokens"] == sum(len(each.response_tokens) for each in records)
    assert (said["passes"], said["answers"], len(said["by_pass"])) == (3, len(records), 3)
    assert {"tokens_per_s", "spec_accept_rate", "spec_accept_length", "out"} <= set(said)
    assert "reward" not in said


def test_rewards_a_task_and_compression(rhymerl: Run, tmp_path: Path) -> None:
    out = tmp_path / "a.jsonl.gz"
    more = ["data.prompts=null", "task=running_sum", "task.difficulty=2", "task.train_size=3", "passes=2"]
    records, said = recorded(rhymerl, out, *more, "rewards={digits: tests.integration.rewards.digits}")
    assert gzip.decompress(out.read_bytes()).startswith(b'{"epoch":0,')
    assert len(records) == 2 * 3 * 4
    assert 0 < said["reward"] < 1
    assert said["reward"] == pytest.approx(np.mean([each.reward for each in records]))


def test_episodes_with_an_environment(rhymerl: Run, tmp_path: Path) -> None:
    more = ["passes=2", "rollout.stop_token_ids=[2,3]", "rewards={turns: rhymerl.rewards.turn_rewards}"]
    more += ["environment=tests.environments.worlds.Counts", "rollout.max_tokens=16"]
    plain, said = recorded(rhymerl, tmp_path / "none.jsonl", "drafter=none", *more)
    ours, with_drafts = recorded(rhymerl, tmp_path / "drafted.jsonl", "drafter=history_tree", "debug=true", *more)
    assert_same_records(ours, plain)
    masks = [each.sampled for each in plain if each.sampled is not None]
    assert len(masks) > 10
    assert sum(not mask.all() for mask in masks) > 10, "there are replies"
    for one, two in zip(ours, plain, strict=True):
        assert (one.sampled is None) == (two.sampled is None)
        assert one.sampled is None or two.sampled is None or one.sampled.tolist() == two.sampled.tolist()
    assert {each.reward for each in plain} > {0.5, 2.0}
    assert said["reward"] == pytest.approx(np.mean([each.reward for each in plain]))
    assert with_drafts["tokens"] == said["tokens"] < sum(len(each.response_tokens) for each in plain)


def test_twice_the_same_file_and_only_when_asked(rhymerl: Run, tmp_path: Path) -> None:
    out = tmp_path / "a.jsonl"
    first = rhymerl(*words(out, "dtype=float32", "passes=2"))
    assert (first.code, first.err) == (0, "")
    assert "Rollouts" in first.out
    assert str(out) in first.out.replace("\n", "")
    content = out.read_bytes()
    assert rhymerl(*words(out, "dtype=float32", "passes=2")).code == 2
    out.write_bytes(content + b"more")
    assert rhymerl(*words(out, "dtype=float32", "passes=2", "overwrite=true")).code == 0
    assert out.read_bytes() == content


def test_a_killed_run_leaves_whole_lines(rhymerl: Run, tmp_path: Path) -> None:
    plain, _ = recorded(rhymerl, tmp_path / "whole.jsonl", "drafter=none")
    killer = "drafter={_target_: tests.integration.programs.DieInRollout, call: 50}"  # 20 answers a pass
    process = programs.start(words(tmp_path / "a.jsonl", killer), tmp_path / "output")
    process.join(600)
    assert process.exitcode == -signal.SIGKILL, (tmp_path / "output").read_text()
    assert_same_records(list(read_trace(tmp_path / "a.jsonl")), [each for each in plain if each.epoch < LAST])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (["model.path=nowhere/at/all"], "model.path='nowhere/at/all': no such directory"),
        (["model.path=folder"], "model.path='folder': not a model directory"),
        (["model.path=???"], "model.path: required, but not set"),
        (["data.prompts=nothing.jsonl"], "data.prompts='nothing.jsonl': no such file"),
        (["data.prompts=null"], "data.prompts=null: name a .jsonl, .csv or .parquet file"),
        (["data.prompts=empty.jsonl"], "data.prompts='empty.jsonl': the data set is empty"),
        (["data.prompts=broken.jsonl"], "data.prompts='broken.jsonl', line 1: not valid JSON"),
        (["data.prompt_column=question"], "data.prompts='prompts.jsonl', line 1: data.prompt_column='question'"),
        (["data.samples=0"], "data.samples=0: expected at least 1"),
        (["data.max_prompt_tokens=2"], "more than data.max_prompt_tokens=2"),
        (["passes=0"], "passes=0: expected at least 1"),
        (["environment_workers=0"], "environment_workers=0: expected at least 1"),
        (["rollout.dynamic_sampling=1"], "rollout.dynamic_sampling=1: nothing is trained here"),
        (["passes=two"], "passes='two': expected int"),
        (["seed=-1"], "seed=-1: expected 0 to"),
        (["dtype=int8"], "dtype='int8': expected one of float32, bfloat16, float64"),
        (["out=null"], "out=null: name the file to write"),
        (["out=none/a.jsonl"], "out='none/a.jsonl': there is no directory 'none'"),
        (["out=folder"], "out='folder': is a directory"),
        (["out=there.jsonl"], "out='there.jsonl': exists already; give another file, or set overwrite=true"),
        (["out=there.jsonl/a.jsonl"], "out='there.jsonl/a.jsonl': there is no directory"),
        (["out=/proc/a.jsonl"], "out='/proc'"),
        (["out=there.jsonl", "overwrite=true", "rollout.max_tokens=200"], "set rollout.max_tokens to at most"),
        (["rollout.max_tokens=0"], "rollout.max_tokens=0: expected at least 1"),
        (["backend.kv_tokens=8"], "backend.kv_tokens=8: the longest prompt and its answer need"),
        (["environment=tools"], "environment.calls=None: the chat template is missing; expected one of hermes"),
        (
            ["environment=tools", "environment.calls=hermes"],
            "data.prompts='prompts.jsonl', line 1: the prompt is plain text",
        ),
        (["rewards=no_such_module.fn"], "no_such_module"),
        (["rewards={each: tests.integration.test_rollout_command.needs_a_column}"], "missing_column"),
        (["drafter=crystal_ball"], "drafter='crystal_ball': expected one of history_tree, ngram, none"),
        (["sed=1"], "unknown setting sed"),
        (["--config=quickstart"], "--config quickstart: is a config of rhymerl fit, not of rhymerl rollout"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_one_line_and_exit_code_2(changed: list[str], message: str, index: Path, tmp_path: Path, rhymerl: Run) -> None:
    before = sorted(index.rglob("*"))
    done = rhymerl(*words(tmp_path / "a.jsonl", *changed))
    assert done.code == 2, done.err
    assert done.err.startswith("error: ")
    assert done.err.count("\n") == 1, done.err
    assert message in done.err
    assert done.out == ""
    assert not (tmp_path / "a.jsonl").exists()
    assert sorted(index.rglob("*")) == before
    assert (index / "there.jsonl").read_text() == "mine\n"


def test_a_config_of_another_command(rhymerl: Run) -> None:
    done = rhymerl("rollout", "--config=quickstart")
    assert (done.code, done.out) == (2, "")
    told = "--config quickstart: is a config of rhymerl fit, not of rhymerl rollout"
    assert done.err == f"error: {told}; expected the path of a .yaml file, or one of rollout\n"


def needs_a_column(completion: str, *, missing_column: str) -> float:
    return float(completion == missing_column)
