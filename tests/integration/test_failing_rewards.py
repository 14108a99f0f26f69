"""A reward that never works is no reward: the command stops and names it. One that fails at times is counted."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path

import numpy as np
import pytest

from rhymerl.errors import RewardError
from rhymerl.report import read_run
from rhymerl.report.steps import STEPS, read_steps
from rhymerl.rewards import Reward
from rhymerl.rewards.failures import Failures
from rhymerl.testing import tiny_policy
from tests.integration.conftest import Run, rows
from tests.report.directories import data_of

BROKEN = "rewards={digits: tests.integration.rewards.digits, bad: tests.integration.rewards.broken}"
REASON = "the first with ZeroDivisionError: no marks today (rewards.py:"


def test_a_step_without_any_reward_ends_the_run(settings: list[str], tmp_path: Path, rhymerl: Run) -> None:
    done = rhymerl(*settings, BROKEN, f"run_dir={tmp_path / 'run'}", "trainer.limit_val_batches=0")
    assert done.code == 1
    error = next(line for line in done.err.splitlines() if line.startswith("error: "))
    assert error.startswith(
        "error: rewards.bad.function='tests.integration.rewards.broken': all 16 calls of a step failed"
    )
    assert REASON in error
    assert not (tmp_path / "run" / "summary.json").exists()


@pytest.mark.parametrize("command", [pytest.param("fit", marks=pytest.mark.slow), "evaluate"])
def test_an_evaluation_without_any_reward_ends_it(
    command: str, settings: list[str], tmp_path: Path, rhymerl: Run
) -> None:
    done = rhymerl(command, *settings[1:], BROKEN, f"run_dir={tmp_path / 'run'}")
    assert done.code == 1
    assert "rewards.bad.function='tests.integration.rewards.broken': all 4 calls of an evaluation failed" in done.err
    assert REASON in done.err


def test_a_reward_that_fails_at_times_is_counted(
    settings: list[str], tmp_path: Path, rhymerl: Run, caplog: pytest.LogCaptureFixture
) -> None:
    rewards = "rewards={digits: tests.integration.rewards.digits, some: tests.integration.rewards.broken_for_some}"
    done = rhymerl(*settings, rewards, f"run_dir={tmp_path / 'run'}", "trainer.max_steps=4", "drafter=none")
    assert done.code == 0, done.err
    lengths = [len(row["response"]) for row in rows(tmp_path / "run" / "samples.jsonl")]
    assert any(length % 2 for length in lengths), "else nothing has failed"
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert 0 < summary["reward_failure_rate"] < 0.5  # of the calls of two rewards, one of which never fails
    assert "reward_failure_rate" in done.out
    (words,) = summary["problems"]
    assert re.match(r"rewards\.some failed in \d+% of its 32 calls, which earned its default instead; the first", words)
    assert "ZeroDivisionError: an odd answer (rewards.py:" in words
    assert done.out.splitlines()[-1] == words, "the last line of the run"
    assert "step 1: rewards.some failed in" in caplog.text
    page = (tmp_path / "run" / "report.html").read_text()
    assert f'<p class="missing bad">{html.escape(words)}</p>' in page


def test_a_reward_that_does_not_apply_is_no_failure(
    prompts: Path, model_dir: Path, rhymerl: Run, caplog: pytest.LogCaptureFixture
) -> None:
    """In steps of both tasks, of one, and of the other alone."""
    words = [f"data.train={prompts}", f"model.path={model_dir}", "data.prompts_per_step=1", "data.shuffle=false"]
    more = [
        "rewards={exact_match: null, even: tests.integration.rewards.for_even_sums}",
        "rollout.max_tokens=8",
        "rollout.group_size=4",
    ]
    done = rhymerl("fit", "--config=grpo_jsonl", *words, *more, "trainer.max_steps=4", "run_dir=run")
    assert done.code == 0, done.err
    summary = json.loads(Path("run/summary.json").read_text())
    assert summary["steps"] == 4
    assert summary["reward_failure_rate"] == 0
    (told,) = summary["problems"]
    assert told.startswith(
        "rewards: none applied to 50% of 16 answers, which were left out of the update; rewards.even"
    )
    rewards = [(row["reward"], row["rewards"]) for row in rows(Path("run/samples.jsonl"))]
    assert all((reward is None) == (parts == {}) for reward, parts in rewards)
    answers = read_run("run").answers
    assert answers is not None
    assert np.isnan(answers.reward).tolist() == [False] * 4 + [True] * 4 + [False] * 4 + [True] * 4
    assert data_of(Path("run/report.html").read_text())["samples"][0]["columns"]["reward"][4:8] == [None] * 4
    steps = [each for each in read_steps(Path("run", STEPS)) if "evaluation" not in each]
    assert [("reward" in each["metrics"], "rewards/even/mean" in each["metrics"]) for each in steps] == [
        (True, True),
        (False, False),
    ] * 2
    assert [each["metrics"]["grad_norm"] > 0 for each in steps] == [True, False] * 2
    assert caplog.text.count(": rewards: none applied to") == 1


@pytest.fixture
def endless(tmp_path: Path) -> Path:
    """A model of which nobody knows how it ends an answer."""
    path = tmp_path / "endless"
    tiny_policy("llama", dtype="float32", context=128).save(path)
    (path / "generation_config.json").unlink()
    for name in ("config.json", "tokenizer_config.json"):
        content = {**json.loads((path / name).read_text()), "eos_token_id": None, "eos_token": None}
        (path / name).write_text(json.dumps({key: value for key, value in content.items() if value is not None}))
    return path


def test_a_run_that_leaves_everything_out_says_so(
    settings: list[str], endless: Path, tmp_path: Path, rhymerl: Run, caplog: pytest.LogCaptureFixture
) -> None:
    words = ["algo.mask_truncated=true", "rollout.max_tokens=1", f"model.path={endless}", f"run_dir={tmp_path / 'run'}"]
    done = rhymerl(*settings, *words, "trainer.max_steps=4", "trainer.limit_val_batches=0")
    assert done.code == 0, done.err
    last = done.out.splitlines()[-1]
    assert last == "Nothing was learned: all answers were cut off at rollout.max_tokens and left out of the loss"
    assert "step 1: all answers are cut off at rollout.max_tokens and left out of the loss, so nothing" in caplog.text
    assert "algo.mask_truncated=true" not in caplog.text, "it is set"


def test_a_model_without_an_end_is_said_at_the_start(
    endless: Path, prompts: Path, rhymerl: Run, caplog: pytest.LogCaptureFixture
) -> None:
    words = [
        "--config=grpo_jsonl",
        f"data.train={prompts}",
        f"model.path={endless}",
        "rollout.max_tokens=8",
        "--dry-run",
    ]
    assert rhymerl("fit", *words, "rollout.stop_token_ids=[1]").code == 0
    assert "no stop token" not in caplog.text, "one is named"
    assert rhymerl("fit", *words).code == 0
    assert "rollout.stop_token_ids=[]: no stop token is known" in caplog.text


@pytest.fixture
def thinking(tmp_path: Path) -> Path:
    """A model whose tags are special tokens, and whose answers are letters at random."""
    from tokenizers import AddedToken

    path = tmp_path / "thinking"
    policy = tiny_policy("llama", dtype="float32", context=128)
    policy.tokenizer.add_tokens([AddedToken(f"<{tag}>", special=True) for tag in ("a", "/a")], special_tokens=True)
    policy.model.resize_token_embeddings(len(policy.tokenizer), mean_resizing=False)
    policy.save(path)
    return path


def test_tags_that_are_special_tokens_are_kept_or_refused(thinking: Path, prompts: Path, rhymerl: Run) -> None:
    form = "{function: rhymerl.rewards.tag_match, arguments: {tags: [a]}}"
    words = ["fit", "--config=grpo_jsonl", f"data.train={prompts}", f"model.path={thinking}", "rollout.max_tokens=8"]
    done = rhymerl(*words, f"rewards={{exact_match: null, form: {form}}}", "run_dir=run")
    assert done.code == 2
    assert done.err == (
        "error: rewards.form.arguments.tags=['a']: '<a>' is a special token, without which rewards get their texts; set "
        "rollout.skip_special_tokens=false\n"
    )
    more = ["rollout.skip_special_tokens=false", "trainer.max_steps=1", "run_dir=run", "evaluation.temperature=0.5"]
    done = rhymerl(*words, "rewards={exact_match: null, tags: tests.integration.rewards.tags}", *more)
    assert done.code == 0, done.err
    texts = [row["response"] for row in rows(Path("run/samples.jsonl"))]
    assert any("<a>" in text or "</a>" in text for text in texts)
    assert not any("<end>" in text for text in texts), "but for the stop token"
    answers = read_run("run").answers
    assert answers is not None
    for text in answers.texts.values():
        assert sum(count for count, _ in text["runs"]) == len(text["text"])


def test_rates_are_those_of_all_ranks_together() -> None:
    reward = Reward("tests.integration.rewards.digits")
    one = Failures(num_samples=3, num_failed={"digits": 3}, first={"digits": "KeyError: 'a'"})
    (one + Failures(num_samples=1)).check([reward], "a step")
    Failures().check([reward], "a step")
    other = Failures(num_samples=1, num_failed={"digits": 1}, first={"digits": "KeyError: 'b'"})
    with pytest.raises(RewardError, match="all 4 calls of a step failed, the first with KeyError: 'a'"):
        (Failures() + one + other).check([reward], "a step")
