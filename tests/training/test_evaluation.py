"""The metrics of the answers to validation prompts, against numbers worked by hand."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rhymerl.config import describe, instantiate
from rhymerl.errors import ConfigError, RewardError
from rhymerl.rewards import Reward
from rhymerl.rollout import RolloutSettings
from rhymerl.rollout.base import requests_of
from rhymerl.testing import make_prompt
from rhymerl.training.checks import longest_tokens
from rhymerl.training.evaluation import EvaluationSettings, evaluation_metrics, majority, pass_at_k, step_name
from rhymerl.training.given_rewards import check_evaluation
from rhymerl.types import Completion, Output, Prompt, Sample

# Rewards of each prompt's answers, what they say, how long they are, and whether they were cut off.
ANSWERS = {
    "a": [(1.0, "#7", 2, False), (1.0, "#7", 4, False), (0.0, "#8", 6, True), (0.0, "#8", 8, False)],
    "b": [(0.0, "#1", 2, False), (0.0, "#1", 2, False), (1.0, "#2", 2, False), (0.5, "", 2, True)],
    "c": [(0.0, "", 4, False)] * 4,
}


def samples(answers: dict[str, list[Any]] = ANSWERS) -> list[Sample]:
    prompts = [
        Prompt(id=name, key=name, token_ids=np.array([1], np.int32), text=name, columns={"answer": "7"})
        for name in answers
    ]
    size = max(map(len, answers.values()))
    settings = RolloutSettings(group_size=size, max_tokens=16)
    requests = requests_of(prompts, "evaluation", settings, seed=0, stop_token_ids=())
    return [
        sample(request, *answers[request.prompt.id][request.sample])
        for request in requests
        if request.sample < len(answers[request.prompt.id])
    ]


def sample(request: Any, reward: float, text: str, length: int, is_cut: bool) -> Sample:
    tokens = np.zeros(length, np.int32)
    generated = Output(token_ids=tokens, logprobs=np.zeros(length), policy_versions=tokens)
    return Sample(
        completion=Completion(request=request, output=replace(generated, finish_reason="length" if is_cut else "stop")),
        text=text,
        reward=reward,
        rewards={"exact": reward, "style": float("#" in text)},
        loss_mask=np.ones(length, np.bool_),
    )


def after_hash(text: str) -> str | None:
    return text.partition("#")[2] or None


def test_a_sum_that_is_rounded_is_right_all_the_same() -> None:
    whole = sum([0.7, 0.2, 0.1][::-1]), sum([0.1, 0.2, 0.7]), 0.7 + 0.2 + 0.1
    assert min(whole) < 1
    found = evaluation_metrics([replace(each, reward=min(whole)) for each in samples()], "mine")
    assert found["eval/mine/pass@1"] == 1


def test_metrics_by_hand() -> None:
    found = evaluation_metrics(samples(), "mine", extract=after_hash)
    assert found == {
        "eval/reward": pytest.approx(3.5 / 12),
        "eval/mine/mean@4": pytest.approx(3.5 / 12),
        # Of 4 answers 2, 1 and 0 are right. Two of them: 1 - C(2, 2) / C(4, 2) = 5/6, 1 - C(3, 2) / C(4, 2) = 1/2, 0.
        "eval/mine/pass@1": pytest.approx((2 / 4 + 1 / 4) / 3),
        "eval/mine/pass@2": pytest.approx((5 / 6 + 1 / 2) / 3),
        "eval/mine/pass@4": pytest.approx(2 / 3),
        # a: 7 and 8 have two votes each, and 7 is right; b: 1 has two, and is wrong; c: nobody votes.
        "eval/mine/maj@4": pytest.approx((1 / 2 + 0 + 0) / 3),
        "eval/mine/mean_length": pytest.approx(44 / 12),
        "eval/mine/clipped_ratio": pytest.approx(2 / 12),
        "eval/mean_length": pytest.approx(44 / 12),
        "eval/clipped_ratio": pytest.approx(2 / 12),
    }


@pytest.mark.parametrize(
    ("rewards", "right_by", "tasks"),
    [
        ({"mine": [0.6, 0.9]}, None, "mine"),
        ({"mine": [0.6, 0.9], "other": [0.3, 0.0]}, None, "mine, other"),
        ({"mine": [0.6, 1.0], "other": [0.3, 0.0]}, None, "other"),
        ({"mine": [0.0, 0.0]}, None, None),
        ({"mine": [0.6, 0.9]}, "style", None),
    ],
)
def test_why_nothing_passes(rewards: dict[str, list[float]], right_by: str | None, tasks: str | None) -> None:
    answered = {task: samples({"a": [(reward, "", 2, False) for reward in values]}) for task, values in rewards.items()}
    settings = EvaluationSettings(samples=2, right_by=right_by)
    words = settings.why_nothing_passes(settings.metrics(answered, []))
    assert words == (
        f"pass@k is 0 for {tasks}, since no answer's reward reaches 1, from which on it counts as right; "
        "evaluation.right_by can name the reward that says so"
        if tasks
        else None
    )


def test_answers_without_a_reward_are_left_out() -> None:
    nan = math.nan
    answers: dict[str, list[Any]] = {
        **ANSWERS,
        "c": [(nan, "", 4, False), *ANSWERS["c"][1:]],
        "d": [(nan, "#7", 4, False)] * 4,
    }
    found = evaluation_metrics(samples(answers), "mine", extract=after_hash)
    assert found["eval/reward"] == found["eval/mine/mean@4"] == pytest.approx(3.5 / 11)
    # Only a and b have a reward for each of their answers.
    assert found["eval/mine/pass@1"] == pytest.approx((2 / 4 + 1 / 4) / 2)
    assert found["eval/mine/maj@4"] == pytest.approx((1 / 2 + 0) / 2)
    assert found["eval/mine/mean_length"] == pytest.approx(60 / 16)
    without = evaluation_metrics([replace(each, rewards={}) for each in samples()], right_by="exact")
    assert not any("pass@" in name for name in without)
    with pytest.raises(RewardError, match="no reward applies to any of the 4 answers to data.validation.mine"):
        evaluation_metrics(samples({"d": answers["d"]}), "mine")


def test_names_with_one_answer_a_prompt() -> None:
    """The names are those that there have always been; a majority of one says nothing."""
    found = evaluation_metrics(samples({"a": [(1.0, "#7", 2, False)]}), extract=after_hash)
    assert set(found) == {
        "eval/reward",
        "eval/validation/mean@1",
        "eval/validation/pass@1",
        "eval/validation/mean_length",
        "eval/validation/clipped_ratio",
        "eval/mean_length",
        "eval/clipped_ratio",
    }


@pytest.mark.parametrize(
    ("most", "ks"), [(1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (8, [1, 2, 4, 8]), (12, [1, 2, 4, 8, 12])]
)
def test_pass_at_powers_of_two_and_all(most: int, ks: list[int]) -> None:
    found = evaluation_metrics(samples({"a": [(0.0, "", 1, False)] * most}))
    assert [name for name in found if "pass@" in name] == [f"eval/validation/pass@{k}" for k in ks]


@pytest.mark.parametrize("num_correct", range(6))
def test_pass_at_k_is_the_share_of_subsets_with_a_right_one(num_correct: int) -> None:
    from itertools import combinations

    right = [index < num_correct for index in range(5)]
    for k in range(1, 6):
        subsets = list(combinations(right, k))
        assert pass_at_k(5, num_correct, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


@pytest.mark.parametrize(
    ("answers", "right", "expected"),
    [
        (["7", "7", "8"], [True, True, False], 1.0),
        (["8", "8", "7"], [False, False, True], 0.0),
        (["7", "8"], [True, False], 0.5),
        (["7", "8", "9"], [True, False, False], 1 / 3),
        (["7", "7", "8", "8", "9"], [True, True, False, False, True], 0.5),
        ([None, None, "7"], [False, False, True], 1.0),
        ([None, None], [True, True], 0.0),
        (["7", "7"], [True, False], 0.5),  # judged by something else besides
        ([], [], 0.0),
    ],
)
def test_majority(answers: list[object], right: list[bool], expected: float) -> None:
    assert majority(answers, right) == pytest.approx(expected)


def fails(text: str) -> str:
    raise ValueError("no luck")


@pytest.mark.parametrize("extract", [fails, lambda text: [text], lambda text: None])
def test_an_extractor_that_finds_nothing_usable_casts_no_vote(extract: Callable[[str], object]) -> None:
    assert evaluation_metrics(samples(), extract=extract)["eval/validation/maj@4"] == 0


def test_several_sets() -> None:
    other = samples({"x": [(1.0, "#1", 10, False)]})
    found = EvaluationSettings().metrics({"mine": samples(), "other": other}, [])
    assert found["eval/mine/mean@4"] == pytest.approx(3.5 / 12)
    assert found["eval/other/mean@1"] == 1
    assert found["eval/other/mean_length"] == 10
    assert found["eval/reward"] == pytest.approx((3.5 / 12 + 1) / 2), "each set weighs the same"
    assert found["eval/mean_length"] == pytest.approx((44 / 12 + 10) / 2)


def test_right_by_one_reward_and_votes_by_a_rewards_own_extractor() -> None:
    rewards = [
        Reward("rhymerl.rewards.format_match", name="style"),
        Reward("rhymerl.rewards.numeric_match", name="exact"),
    ]
    found = EvaluationSettings(samples=4, right_by="style").metrics({"validation": samples()}, rewards)
    assert found["eval/validation/pass@1"] == pytest.approx((4 / 4 + 3 / 4) / 3)
    assert found["eval/validation/mean@4"] == pytest.approx(3.5 / 12), "the reward, as ever"
    assert found["eval/validation/maj@4"] == pytest.approx((1 + 1 + 0) / 3)
    named = EvaluationSettings(samples=4, extract="rhymerl.rewards.functions.boxed_answer")
    assert named.metrics({"validation": samples()}, rewards)["eval/validation/maj@4"] == 0
    assert "eval/validation/maj@4" not in EvaluationSettings().metrics({"validation": samples()}, rewards[:1])


def test_settings_of_each_set() -> None:
    training = RolloutSettings(max_tokens=64, temperature=0.7, top_p=0.9)
    settings = EvaluationSettings(
        samples=4, max_tokens=32, sets={"greedy": {"samples": 1, "temperature": 0}, "long": {"max_tokens": None}}
    )
    asked = {name: settings.rollout(training, name) for name in ("validation", "greedy", "long")}
    assert {name: (each.group_size, each.temperature, each.max_tokens, each.top_p) for name, each in asked.items()} == {
        "validation": (4, 1.0, 32, 0.9),
        "greedy": (1, 0, 32, 0.9),
        "long": (4, 1.0, 64, 0.9),
    }
    assert [settings.max_tokens_of(name) for name in asked] == [32, 32, None]
    again = instantiate(describe(settings))
    assert again.sets == settings.sets
    assert step_name("validation") == "evaluation"
    assert step_name("greedy") == "evaluation/greedy"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"samples": 0}, "samples=0: expected at least 1"),
        ({"temperature": -1}, "temperature=-1: expected at least 0"),
        ({"max_tokens": 0}, "max_tokens=0: expected at least 1"),
        ({"every_n_steps": -1}, "every_n_steps=-1: expected at least 0"),
        ({"sets": {"a": {"samples": 0}}}, "sets.a.samples=0: expected at least 1"),
        ({"sets": {"a": {"samples": 1.5}}}, "sets.a.samples=1.5: expected a whole number"),
        ({"sets": {"a": {"temperature": None}}}, "sets.a.temperature=None: expected a number"),
        ({"sets": {"a": {"sample": 1}}}, "sets.a.sample: unknown setting; did you mean samples?; known:"),
        ({"extract": "rhymerl.rewards.functions.boxed"}, "extract='rhymerl.rewards.functions.boxed': "),
        (
            {"extract": "rhymerl.rewards.__all__"},
            "extract='rhymerl.rewards.__all__': it is of type list, expected a function of a text",
        ),
    ],
)
def test_settings_out_of_range(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        EvaluationSettings(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sets": {"greed": {}}}, "evaluation.sets.greed: no data set of data.validation; there is greedy, all; did you mean greedy?"),
        ({"right_by": "style"}, "evaluation.right_by='style': no reward of the run; expected one of numeric_match, or null"),
    ],
)  # fmt: skip
def test_names_that_there_are_not(settings: dict[str, Any], message: str) -> None:
    rewards = [Reward("rhymerl.rewards.numeric_match")]
    check_evaluation(EvaluationSettings(sets={"all": {}}, right_by="numeric_match"), ["greedy", "all"], rewards)
    with pytest.raises(ConfigError) as error:
        check_evaluation(EvaluationSettings(**settings), ["greedy", "all"], rewards)
    assert str(error.value) == message


def test_replies_are_counted_by_the_limits_of_the_run_in_evaluations_too() -> None:
    loader = SimpleNamespace(prompts=[make_prompt([1, 2, 3])])
    data: Any = SimpleNamespace(train_loader=None, validation_loaders={"validation": loader})
    parts: dict[str, Any] = {
        "rollout": RolloutSettings(max_tokens=10, max_turns=3, max_reply_tokens=5),
        "evaluation": EvaluationSettings(),
    }
    assert longest_tokens(data, **parts) == 3 + 10
    assert longest_tokens(data, **parts, has_environment=True) == 3 + 10 + 2 * 5
