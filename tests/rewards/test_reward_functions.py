"""The ready-made rewards."""

from __future__ import annotations

import re
from contextlib import nullcontext
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from rhymerl.errors import ConfigError
from rhymerl.rewards import Reward, check_reward, exact_match, format_match, length_penalty, numeric_match, tag_match
from rhymerl.rewards.functions import boxed_answer, last_number


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        (" 42\n", "42", 1.0),
        ("42", 42, 1.0),
        ("42.", "42", 0.0),
        ("", "", 1.0),
        ("72", 72.0, 1.0),  # as pandas has whole numbers in a column with gaps
        ("72.0", 72.0, 1.0),
        ("72", "72.0", 0.0),
        ("0.5", 0.5, 1.0),
    ],
)
def test_exact_match(completion: str, answer: object, reward: float) -> None:
    assert exact_match(completion, answer=answer) == reward


@pytest.mark.parametrize("answer", [None, True, ["72", "72.0"], {"a": 1}, float("nan"), float("inf")])
@pytest.mark.parametrize("function", [exact_match, numeric_match])
def test_an_answer_that_is_no_text_and_no_number_is_an_error(function: Any, answer: object) -> None:
    with pytest.raises(ValueError, match=r"answer=.*: expected a "):
        function(str(answer), answer=answer)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("so 3 + 4 = 7.", "7"),
        ("it costs $1,234.50 in all", "1234.5"),
        ("1,2,3", "3"),
        ("12,3456", "3456"),
        ("1,234,567", "1234567"),
        (r"1{,}234{,}567", "1234567"),
        (r"1\,234", "1234"),
        ("1\u202f234\u00a0567,", "1234567"),
        ("x=5-3", "3"),
        ("x = -3", "-3"),
        ("x = \u22123", "-3"),
        ("x = \u20133", "-3"),
        ("x = - 3", "-3"),
        ("x =-3", "-3"),
        ("10 - 3", "3"),
        ("10\u20133", "3"),
        ("- 3 apples", "3"),
        ("-$3", "-3"),
        (r"\boxed{-\$1,234}", "-1234"),
        ("$-3", "-3"),
        ("-\u20ac3", "-3"),
        ("(2)-4", "4"),
        (r"x^{2}-4", "4"),
        (".5", "0.5"),
        ("-.5", "-0.5"),
        ("about 3e-2", "0.03"),
        ("37+85=122;#122", "122"),
        (r"\boxed{-17}", "-17"),
        ("50% of 8", "8"),
        ("9007199254740993", "9007199254740993"),
        ("9" * 400, "9" * 400),
        ("1e999999999", "1e999999999"),
        ("1e" + "9" * 30, None),
        ("H2O", None),
        ("none", None),
    ],
)
def test_last_number(text: str, number: str | None) -> None:
    assert last_number(text) == (None if number is None else Decimal(number))


@pytest.mark.parametrize(
    ("completion", "answer", "tolerance", "reward"),
    [
        ("7.0", "7", 0.0, 1.0),
        ("7", 7, 0.0, 1.0),
        ("1234", "1,234", 0.0, 1.0),
        ("0.33", "0.3333", 0.01, 1.0),
        ("0.31", "0.3333", 0.01, 0.0),
        ("no number", "7", 0.0, 0.0),
        ("9007199254740993", "9007199254740992", 0.0, 0.0),
        ("9007199254740993", 9007199254740993, 0.0, 1.0),
        ("9" * 400, "9" * 400, 0.0, 1.0),
        ("9" * 400, "1" * 400, 0.0, 0.0),
        ("1" * 400, "1" * 399 + "2", 1.0, 1.0),
        ("0.1", "0.10", 0.0, 1.0),
        ("0.1", 0.1, 0.0, 1.0),
        ("0.31", "0.3", 0.01, 1.0),
        ("1e999999999", "1", 0.5, 0.0),
        ("-7", "\u22127", 0.0, 1.0),
        ("7", "+7", 0.0, 1.0),
        ("1234", "$1,234", 0.0, 1.0),
        ("123", "1,2,3", 0.0, ValueError),
        ("1234", "12,34", 0.0, ValueError),
        ("7", "7 apples", 0.0, ValueError),
    ],
)
def test_numeric_match(completion: str, answer: object, tolerance: float, reward: Any) -> None:
    with pytest.raises(ValueError, match="expected a number") if reward is ValueError else nullcontext():
        assert numeric_match(completion, answer=answer, tolerance=tolerance) == reward


@given(
    answer=st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.decimals(allow_nan=False, allow_infinity=False)
    | st.text("0123456789.,+-\u2212$ e", max_size=8)
)
@pytest.mark.parametrize("function", [exact_match, numeric_match])
def test_an_answer_that_is_not_refused_earns_what_it_is_worth(function: Any, answer: object) -> None:
    try:
        function.try_answer(answer)
    except ValueError:
        assume(False)
    assert function(f" {answer}\n", answer=answer) == 1.0


def test_numeric_match_needs_a_number() -> None:
    with pytest.raises(ValueError, match="seven"):
        numeric_match("7", answer="seven")


@pytest.mark.parametrize(
    ("completion", "reward"),
    [("<think>a\nb</think>4", 1.0), ("<think>a</think>", 0.0), (" <think></think>4", 0.0)],
)
def test_format_match(completion: str, reward: float) -> None:
    assert format_match(completion, pattern=r"<think>.*</think>\d+") == reward


@pytest.mark.parametrize(("length", "reward"), [(0, 0.0), (10, 0.0), (15, -0.5), (20, -1.0), (99, -1.0)])
def test_length_penalty(length: int, reward: float) -> None:
    assert length_penalty("x" * length, free_characters=10, max_characters=20) == reward


def test_length_penalty_refuses_an_empty_range() -> None:
    with pytest.raises(ValueError, match="free_characters=20"):
        length_penalty("x", free_characters=20, max_characters=20)


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("<think>a < b</think>\n<answer>4</answer>\n", 1.0),
        ("<think>a</think><answer><b>4</b></answer>", 1.0),
        ("<think> </think><answer>4</answer>", 0.0),
        ("<answer>4</answer><think>a</think>", 0.0),
        ("<think>a</think>so <answer>4</answer>", 0.0),
        ("<think>a</think><answer>4</answer><answer>5</answer>", 0.0),
        ("<think>a</think><answer>4", 0.0),
    ],
)
def test_tag_match(completion: str, reward: float) -> None:
    assert tag_match(completion, tags=["think", "answer"]) == reward


@pytest.mark.parametrize(
    ("prompt", "completion", "reward"),
    [
        ("<|assistant|>\n<think>\n", "a</think><answer>4</answer>", 1.0),
        ("<|assistant|><think>", "<think>a</think><answer>4</answer>", 0.0),
        ("<|assistant|><think>", "</think><answer>4</answer>", 0.0),
        ("<|assistant|>", "a</think><answer>4</answer>", 0.0),
        ("<|assistant|><answer>", "a</think><answer>4</answer>", 0.0),
        (["a column of that name"], "<think>a</think><answer>4</answer>", 1.0),
    ],
)
def test_a_tag_that_the_prompt_has_opened_counts(prompt: Any, completion: str, reward: float) -> None:
    assert tag_match(completion, tags=["think", "answer"], prompt=prompt) == reward


PIECES = st.lists(st.sampled_from(["<a>", "</a>", "<b>", "</b>", "x", " ", "\n", "<"]), max_size=2).map("".join)


@given(*[PIECES] * 5)
def test_tag_match_is_what_a_regular_expression_says(
    before: str, first: str, middle: str, second: str, after: str
) -> None:
    text = f"{before}<a>{first}</a>{middle}<b>{second}</b>{after}"
    matched = re.fullmatch(r"<a>(.*)</a>\s*<b>(.*)</b>", text.strip(), flags=re.DOTALL)
    once = all(text.count(tag) == 1 for tag in ("<a>", "</a>", "<b>", "</b>"))
    expected = matched is not None and once and all(part.strip() for part in matched.groups())
    assert tag_match(text, tags=["a", "b"]) == expected


def test_tag_match_reads_a_text_once() -> None:
    """A regular expression would take days for this one, and this test with it."""
    text = "<a>" + "</a> <b></b> <c>" * 20_000
    assert tag_match(text, tags=["a", "b", "c"]) == 0.0


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        ("format_match", {"pattern": "(a"}, "pattern='(a': expected a regular expression: missing ), unterminated subpattern"),
        ("format_match", {"pattern": "a{99999999999}"}, "pattern='a{99999999999}': expected a regular expression: the rep"),
        ("format_match", {"pattern": 7}, "pattern=7: expected a regular expression"),
        ("format_match", {"pattern": r"<a>.*</a>"}, ""),
        ("tag_match", {"tags": "think"}, "tags='think': expected a list of different tags, such as [think, answer]"),
        ("tag_match", {"tags": []}, "tags=[]: expected a list of different tags"),
        ("tag_match", {"tags": ["a", "a"]}, "tags=['a', 'a']: expected a list of different tags"),
        ("tag_match", {"tags": ["a", ""]}, "tags=['a', '']: expected a list of different tags"),
        ("tag_match", {"tags": ["a", 1]}, "tags=['a', 1]: expected a list of different tags"),
        ("tag_match", {"tags": None}, "tags=None: expected a list of different tags"),
        ("tag_match", {"tags": ("a", "b")}, ""),
        ("length_penalty", {"free_characters": 20, "max_characters": 20}, "free_characters=20: expected less than max_characters=20"),
        ("length_penalty", {"free_characters": -1, "max_characters": 20}, "free_characters=-1: expected a number, at least 0"),
        ("length_penalty", {"free_characters": "9", "max_characters": 20}, "free_characters='9': expected a number, at least 0"),
        ("length_penalty", {"free_characters": 9, "max_characters": True}, "max_characters=True: expected a number, at least 0"),
        ("length_penalty", {"free_characters": 9, "max_characters": 20}, ""),
        ("numeric_match", {"tolerance": "0.1"}, "tolerance='0.1': expected a number, at least 0"),
        ("numeric_match", {"tolerance": -0.1}, "tolerance=-0.1: expected a number, at least 0"),
        ("numeric_match", {"tolerance": 0}, ""),
    ],
)  # fmt: skip
def test_arguments_are_checked_before_a_run(function: str, arguments: dict[str, Any], message: str) -> None:
    reward = Reward(f"rhymerl.rewards.{function}", name="form", arguments=arguments)
    if not message:
        check_reward(reward, ["answer"])
        return
    with pytest.raises(ConfigError) as error:
        check_reward(reward, ["answer"])
    assert str(error.value).startswith(f"rewards.form.arguments.{message}")


def test_columns_may_be_what_arguments_are() -> None:
    """Each row then has its own, which nobody has seen yet."""
    check_reward(Reward("rhymerl.rewards.format_match"), ["pattern"])
    check_reward(Reward("rhymerl.rewards.length_penalty", arguments={"free_characters": 9}), ["max_characters"])
    with pytest.raises(ConfigError, match="needs a column 'tags'"):
        check_reward(Reward("rhymerl.rewards.tag_match"), [])


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{1} or \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{ 7 }", "7"),
        (r"\boxed{7", None),
        ("7", None),
    ],
)
def test_boxed_answer(text: str, answer: str | None) -> None:
    assert boxed_answer(text) == answer


@pytest.mark.parametrize(
    ("function", "text", "extracted"),
    [
        ("exact_match", " 7\n", "7"),
        ("numeric_match", "it is 7.0", Decimal(7)),
        ("numeric_match", "9007199254740993", Decimal(9007199254740993)),
        ("numeric_match", "none", None),
    ],
)
def test_what_maj_at_k_counts(function: str, text: str, extracted: object) -> None:
    extract = Reward(f"rhymerl.rewards.{function}").extract
    assert extract is not None
    assert extract(text) == extracted


def test_most_functions_say_nothing_of_that() -> None:
    assert Reward("rhymerl.rewards.length_penalty").extract is None
