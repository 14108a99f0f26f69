"""The running of rewards: where, what they are given, and what comes back."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rhymerl.rewards import Reward, RewardScorer, check_columns
from rhymerl.testing import make_requests
from rhymerl.types import Completion, Output
from tests.bytecodes import bytecodes
from tests.products import values_first

WHERE = ["pool", "main", "engine"]


def test_scores_by_key_and_name_in_order_of_submission() -> None:
    rewards = [Reward("user_rewards.length"), Reward("user_rewards.answered", weight=0.5)]
    with RewardScorer(rewards) as scorer:
        for text in ["ccc", "a", "bb"]:
            scorer.submit(text, text, {"answer": "bb"})
        assert list(scorer.collect().items()) == [
            ("ccc", {"length": 3.0, "answered": 0.0}),
            ("a", {"length": 1.0, "answered": 0.0}),
            ("bb", {"length": 2.0, "answered": 1.0}),
        ]
        assert scorer.collect() == {}
        scorer.submit("a", "again", {"answer": "a"})
        assert scorer.collect() == {"a": {"length": 5.0, "answered": 0.0}}


def test_no_rewards() -> None:
    with RewardScorer([]) as scorer:
        scorer.submit("a", "x", {})
        assert scorer.collect() == {"a": {}}
        assert scorer.metrics() == {}


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize(
    ("function", "columns", "arguments", "expected"),
    [
        ("answered", {"answer": "x", "unused": 1}, {}, 1.0),
        ("answered", {"answer": "x", "bonus": 0.5}, {}, 1.5),
        ("answered", {"answer": "x", "bonus": 0.5}, {"bonus": 2.0}, 3.0),
        ("count_columns", {"answer": "x", "level": 2, "completion": "a column of this name"}, {}, 2.0),
    ],
)
def test_functions_get_the_columns_that_they_accept(
    where: Any, function: str, columns: dict[str, Any], arguments: dict[str, Any], expected: float
) -> None:
    with RewardScorer([Reward(f"user_rewards.{function}", name="r", where=where, arguments=arguments)]) as scorer:
        scorer.submit("a", "x", columns)
        expected += where == "engine" and function == "count_columns"  # the device comes on top
        assert scorer.collect() == {"a": {"r": expected}}


@pytest.mark.parametrize("where", WHERE)
def test_batch_functions_get_lists_of_columns_and_plain_arguments(where: Any) -> None:
    reward = Reward("user_rewards.batch_answered", name="r", batch=True, where=where, arguments={"scale": 3.0})
    with RewardScorer([reward], chunk_size=4) as scorer:
        for number in range(10):
            scorer.submit(str(number), str(number % 3), {"answer": "1"})
        scores = scorer.collect()
    assert [scores[str(number)]["r"] for number in range(10)] == [3.0 * (number % 3 == 1) for number in range(10)]


def test_main_runs_closures_here_and_at_once() -> None:
    seen: list[str] = []

    def closure(completion: str) -> float:
        seen.append(completion)
        return os.getpid()

    with RewardScorer([Reward(closure, where="main")]) as scorer:
        scorer.submit("a", "x", {})
        assert seen == ["x"]
        assert scorer.collect() == {"a": {"closure": float(os.getpid())}}


@pytest.mark.parametrize("where", ["main", "engine"])
@pytest.mark.parametrize("text", ["raise", "exit", "nan", "string"])
@pytest.mark.parametrize("function", ["act", "act_async", "act_in_batch"])
def test_local_failures_cost_one_sample(where: Any, text: str, function: str) -> None:
    batch = function == "act_in_batch"
    reward = Reward(f"user_rewards.{function}", name="r", where=where, default=-1.0, batch=batch)
    with RewardScorer([reward]) as scorer:
        for each in ["a", text, "bb"]:
            scorer.submit(each, each, {})
        assert scorer.collect() == {"a": {"r": 1.0}, text: {"r": -1.0}, "bb": {"r": 2.0}}
        assert scorer.metrics() == {
            "rewards/r/errors": 1.0,
            "rewards/r/timeouts": 0.0,
            "rewards/r/crashes": 0.0,
        }
        assert scorer.metrics()["rewards/r/errors"] == 0.0


@pytest.mark.parametrize(("where", "function"), values_first(WHERE, ["act", "act_async", "act_in_batch"]))
def test_none_means_that_a_function_does_not_apply(where: Any, function: str) -> None:
    """That is no failure, and no reward either; verl's dicts have theirs under a name."""
    settings: Any = {"where": where, "default": -1.0, "batch": function == "act_in_batch"}
    rewards = [Reward(f"user_rewards.{function}", name="r", **settings), Reward("user_rewards.length")]
    with RewardScorer(rewards) as scorer:
        for text in ["none", "score of none", "score", "raise"]:
            scorer.submit(text, text, {})
        assert scorer.collect() == {
            "none": {"length": 4.0},
            "score of none": {"length": 13.0},
            "score": {"r": 2.0, "length": 5.0},
            "raise": {"r": -1.0, "length": 5.0},
        }
        failures = scorer.failures()
    assert (failures.num_samples, failures.num_failed, failures.num_absent) == (4, {"r": 1}, {"r": 2})


@pytest.mark.parametrize("where", WHERE)
def test_a_failed_call_that_is_dropped_gives_no_reward_and_is_a_failure_all_the_same(where: Any) -> None:
    reward = Reward("user_rewards.act", name="r", where=where, default=-1.0, on_failure="drop")
    with RewardScorer([reward]) as scorer:
        for text in ["none", "raise", "a"]:
            scorer.submit(text, text, {})
        assert scorer.collect() == {"none": {}, "raise": {}, "a": {"r": 1.0}}
        failures = scorer.failures()
        assert scorer.metrics()["rewards/r/errors"] == 1.0
    assert (failures.num_failed, failures.num_dropped, failures.num_absent) == ({"r": 1}, {"r": 1}, {"r": 1})
    assert failures.num_unrewarded == 2
    assert failures.sentences()[0].startswith("rewards.r failed in 50% of its 2 calls, which earned nothing; the first")
    assert failures.sentences()[1].endswith("rewards.r returned None for 33% of them, rewards.r failed for 33% of them")


@pytest.mark.parametrize(("where", "function"), values_first(WHERE, ["of_answer", "of_answers"]))
def test_functions_get_what_is_known_of_an_answer(where: Any, function: str) -> None:
    reward = Reward(f"user_rewards.{function}", name="r", where=where, batch=function == "of_answers")
    request = make_requests(1)[0]
    request = replace(request, prompt=replace(request.prompt, text="1+1=?"))
    output = Output(token_ids=np.array([2, 5]), logprobs=np.zeros(2), policy_versions=np.zeros(2, np.int32))
    check_columns(reward, [])
    with RewardScorer([reward]) as scorer:
        for number, reason in enumerate(["stop", "length"]):
            completion = Completion(request=request, output=replace(output, finish_reason=reason))  # type: ignore[arg-type]
            scorer.begin(str(number), "x", {}, completion)
            scorer.submit(str(number), "x", {}, completion)
        scorer.submit("2", "x", {"prompt": "a column of that name wins"}, completion)
        assert [each["r"] for each in scorer.collect().values()] == [1075.0, 75.0, 96.0]


@pytest.mark.parametrize("where", WHERE)
def test_what_a_function_opens_outlives_a_call_and_is_closed_in_the_end(where: Any, tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    reward = Reward("user_rewards.recorded", where=where, arguments={"path": str(path)})
    with RewardScorer([reward], num_processes=1) as scorer:
        for round_ in range(2):
            for number in range(3):
                scorer.submit(f"{round_} {number}", "x", {"ledger": "a column of that name"})
            scores = [each["recorded"] for each in scorer.collect().values()]
            assert scores == [1.0 + 3 * round_, 2.0 + 3 * round_, 3.0 + 3 * round_]
        assert path.read_text() == "opened\n"
    assert path.read_text() == "opened\nclosed\n"


def test_an_argument_stands_for_what_would_be_opened(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    arguments = {"path": str(path), "ledger": [""] * 5}
    with RewardScorer([Reward("user_rewards.recorded", arguments=arguments)], num_processes=1) as scorer:
        scorer.submit("a", "x", {})
        assert scorer.collect() == {"a": {"recorded": 6.0}}
    assert not path.exists()


def test_ctrl_c_in_a_local_reward_ends_the_run() -> None:
    def interrupted(completion: str) -> float:
        raise KeyboardInterrupt

    with RewardScorer([Reward(interrupted, where="main")]) as scorer, pytest.raises(KeyboardInterrupt):
        scorer.submit("a", "x", {})


def test_sync_local_reward_has_no_time_limit_and_async_has() -> None:
    rewards = [
        Reward("user_rewards.act", where="main", timeout_s=0.01),
        Reward("user_rewards.act_async", where="main", timeout_s=0.2, default=-1.0),
    ]
    with RewardScorer(rewards) as scorer:
        scorer.submit("a", "late", {})
        scorer.submit("b", "await", {})
        assert scorer.collect() == {
            "a": {"act": 4.0, "act_async": -1.0},
            "b": {"act": 5.0, "act_async": -1.0},
        }


def test_local_async_works_inside_a_running_loop_and_concurrently() -> None:
    async def in_notebook() -> dict[str, dict[str, float]]:
        with RewardScorer([Reward("user_rewards.meet", where="main", timeout_s=100)]) as scorer:
            for number in range(16):
                scorer.submit(str(number), "16", {})
            return scorer.collect()

    assert asyncio.run(in_notebook()) == {str(number): {"meet": 1.0} for number in range(16)}


def test_engine_rewards_run_at_the_end_in_the_given_order_with_the_device() -> None:
    seen: list[tuple[str, str]] = []

    def on_engine(completion: str, *, device: str) -> float:
        seen.append((completion, device))
        return float(len(completion))

    with RewardScorer([Reward(on_engine, where="engine")], chunk_size=2) as scorer:
        for text in ["ccc", "a", "bb"]:
            scorer.submit(text, text, {"device": "a column of this name"})
        assert seen == []
        scores = scorer.collect("cuda:1", order=["a", "bb", "ccc"])
    assert seen == [("a", "cuda:1"), ("bb", "cuda:1"), ("ccc", "cuda:1")]
    assert list(scores) == ["a", "bb", "ccc"]


def test_wrong_use_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="on_failure='skip': expected one of default, drop"):
        Reward("user_rewards.length", on_failure="skip")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="num_processes=0"):
        RewardScorer([], num_processes=0)
    with pytest.raises(ValueError, match="distinct names"):
        RewardScorer([Reward("user_rewards.length"), Reward("user_rewards.length", weight=2.0)])
    with RewardScorer([]) as scorer:
        scorer.submit("a", "x", {})
        with pytest.raises(ValueError, match="submitted twice"):
            scorer.submit("a", "x", {})
        with pytest.raises(ValueError, match="order: expected the 1 submitted keys"):
            scorer.collect(order=["a", "b"])


@pytest.mark.parametrize(
    "module", ["rhymerl.rewards.process_main", "rhymerl.rewards.scorer", "rhymerl.rewards.functions"]
)
def test_imports_are_light(module: str) -> None:
    program = f"""
import sys
sys.path[:] = {sys.path!r}
import {module}
print(*(name for name in ("torch", "transformers", "lightning", "numpy", "asyncio") if name in sys.modules))
"""
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert shown.split() == (["asyncio"] if module.endswith("scorer") else [])


def test_little_is_done_for_each_sample_of_a_long_stream() -> None:
    def stream(scorer: RewardScorer, first: int, count: int) -> dict[str, dict[str, float]]:
        for number in range(first, first + count):
            scorer.submit(str(number), "x" * 100, {"answer": "x"})
        return scorer.collect()

    with RewardScorer([Reward("user_rewards.length")]) as scorer:
        assert stream(scorer, 0, 4_000) == {str(number): {"length": 100.0} for number in range(4_000)}
        assert bytecodes(lambda: stream(scorer, 4_000, 1_000)) < 2_000 * 1_000
