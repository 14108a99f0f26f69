"""The ready-made rewards."""

from __future__ import annotations

import json
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from decimal import Decimal
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from rhymerl.config import compose, resolved
from rhymerl.errors import ConfigError
from rhymerl.rewards import (
    Reward,
    RewardScorer,
    build_rewards,
    check_reward,
    code,
    exact_match,
    format_match,
    length_penalty,
    math_match,
    numeric_match,
    tag_match,
)
from rhymerl.rewards.functions import boxed_answer, last_number
from rhymerl.rewards.programs import last_code_block
from rhymerl.rewards.sandbox.run import missing_walls

ROOT = Path(__file__).parents[2]
needs_sandbox = pytest.mark.skipif(
    sys.platform != "linux" or bool(missing_walls()), reason="this machine offers no namespaces or no seccomp"
)


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


CODE = "Here:\n```python\ndef f(x):\n    return x + 1\n```\nDone."
PROGRAM = "```\nprint(int(input()) + 1)\n```"


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (CODE, "def f(x):\n    return x + 1\n"),
        (PROGRAM, "print(int(input()) + 1)\n"),
        ("```py\na\n```\n```cpp\nb\n```\nc", "a\n"),
        ("```python\na\n```\n```Python3\nb\nc", "b\nc"),
        ("x = 1", "x = 1"),
        ("```json\n1\n```", "```json\n1\n```"),
        ("Here:\n```\na\nb", "a\nb"),
        ("a\n```", "a\n"),
        ("a\n```\nThis is it.", "a\n"),
        ("a\n```\nOutput:\n```\n1\n```", "a\n"),
        ("a\n```\nExample:\n```json\n1\n```", "a\n"),
        ("```python\na\n```\n```\n", "a\n"),
        ("```python\na\n```\nOutput:\n```\n1\n```", "a\n"),
        ("1. Code:\n   ```python\n   a\n     b\n   ```\n", "a\n  b\n"),
        ("- ```\n  a\n  ```\n", "a\n"),
        ("The program is ```python\na\n```", "a\n"),
        ("Use ```x``` for it:\n```\na\n```", "a\n"),
        ("```python\r\na\r\n    b\r\n```\r\n", "a\n    b\n"),
        ('```python\na\n    """\n    ```\n    f() -> 1\n    ```\n    """\n```', 'a\n    """\n    ```\n    f() -> 1\n    ```\n    """\n'),
        ("````python\na\n```\nb\n````", "a\n```\nb\n"),
        ("```python\na\n```\n```python\n```", "a\n"),
        ("```python title=a.py\na\n```", "a\n"),
    ],
)  # fmt: skip
def test_last_code_block(text: str, code: str) -> None:
    assert last_code_block(text) == code


@pytest.mark.parametrize("part", ["a", " ", "`", "```\n", "```python\n", "` ", "   \n", "a```python\n", "```a"])
def test_the_last_code_block_is_found_in_one_reading(part: str) -> None:
    """A quadratic search takes hours for this one, and the suite's own time limit ends it."""
    text = f"```{part * (1_000_000 // len(part))}"
    assert len(last_code_block(text)) <= len(text)


@needs_sandbox
@pytest.mark.parametrize(
    ("completion", "columns", "reward"),
    [
        (CODE, {"tests": "assert f(1) == 2\nassert f(2) == 3"}, 1.0),
        (CODE, {"tests": ["assert f(1) == 2", "assert f(2) == 4"]}, 0.0),
        (CODE, {"tests": ["assert f(1) == 2", "assert f(2) == 4"], "partial": True}, 0.5),
        (CODE, {"tests": [{"input": [1], "output": 2}], "entry_point": "f"}, 1.0),
        (CODE, {"tests": "def check(candidate):\n    assert candidate(1) == 3", "entry_point": "f"}, 0.0),
        (PROGRAM, {"tests": [{"input": "1", "output": "2"}, {"input": "2", "output": "3\n"}]}, 1.0),
        (PROGRAM, {"tests": [{"input": "1", "output": "3"}]}, 0.0),
        ("no code at all", {"tests": "assert f(1) == 2"}, 0.0),
    ],
)
def test_code(completion: str, columns: dict[str, Any], reward: float) -> None:
    assert code(completion, **columns) == reward


@pytest.mark.parametrize(
    ("columns", "error", "message"),
    [
        ({"tests": []}, ValueError, "at least one"),
        ({"tests": ["assert f(1) == 2", {"input": "", "output": ""}]}, ValueError, "expected Python source"),
        ({"tests": [{"input": ""}]}, ValueError, "expected Python source"),
        ({"tests": [{"input": [1], "output": 2}]}, ValueError, "expected text"),
        ({"tests": [{"input": "1", "output": 2}], "entry_point": "f"}, ValueError, "a list"),
        ({"tests": "assert f(1) = 2"}, SyntaxError, "tests"),
        ({"tests": "assert f(1) == 2", "entry_point": "f("}, SyntaxError, "entry_point"),
    ],
)
def test_tests_that_are_none(columns: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        code(CODE, **columns)


@needs_sandbox
def test_tests_that_judge_nobody_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"tests: they hand an object of Mock to the answer.* expected plain values"):
        code(CODE, tests="from unittest.mock import Mock\nassert f(Mock()) == 2")


@needs_sandbox
def test_code_in_the_pool() -> None:
    """An answer that hangs costs its own reward; tests that are none are an error."""
    reward = Reward("rhymerl.rewards.code", default=-1.0, arguments={"time_limit_s": 0.5})
    texts = [CODE, "while True: pass", CODE.replace("1", "2"), CODE]
    with RewardScorer([reward]) as scorer:
        for number, text in enumerate(texts):
            scorer.submit(str(number), text, {"tests": "assert f(1) == 2" if number < 3 else []})
        scores = [each["code"] for each in scorer.collect().values()]
        metrics = scorer.metrics()
    assert scores == [1.0, 0.0, 0.0, -1.0]
    assert metrics == {"rewards/code/errors": 1, "rewards/code/timeouts": 0, "rewards/code/crashes": 0}


@needs_sandbox
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"timeout_s": 3}, "rewards.code.timeout_s=3: expected at least 7, arguments.time_limit_s and 2 seconds"),
        ({"arguments": {"unsafe_without": ["walls"]}}, "there is no 'walls'; expected some of namespaces, seccomp"),
        ({"arguments": {"time_limit_s": "5"}}, "time_limit_s='5': expected a number of seconds above 0"),
        ({"arguments": {"time_limit_s": 0}}, "time_limit_s=0: expected a number of seconds above 0"),
        ({"arguments": {"memory_mb": "512"}}, "memory_mb='512': expected a whole number, at least 64"),
        ({"arguments": {"memory_mb": 512.5}}, "memory_mb=512.5: expected a whole number, at least 64"),
        ({"arguments": {"memory_mb": 63}}, "memory_mb=63: expected a whole number, at least 64"),
        ({"arguments": {"partial": "yes"}}, "partial='yes': expected true or false"),
        ({"arguments": {"packages": 1}}, "packages=1: expected true or false"),
        ({"arguments": {"unsafe_without": "seccomp"}}, "unsafe_without='seccomp': expected a list of walls"),
        ({"arguments": {"unsafe_without": True}}, "unsafe_without=True: expected a list of walls"),
        ({"arguments": {"entry_point": "f("}}, "entry_point='f(': expected an expression of Python"),
        ({"arguments": {"entry_point": 7}}, "entry_point=7: expected an expression of Python"),
    ],
)
def test_check_of_code(settings: dict[str, Any], message: str) -> None:
    check_reward(Reward("rhymerl.rewards.code"), ["tests"])
    check_reward(Reward("rhymerl.rewards.code", timeout_s=3, where="main"), ["tests"])
    with pytest.raises(ConfigError) as error:
        check_reward(Reward("rhymerl.rewards.code", **settings), ["tests"])
    assert message in str(error.value)


@needs_sandbox
def test_the_least_memory_is_enough_to_start() -> None:
    arguments = {"memory_mb": 64, "time_limit_s": 5.0, "partial": True, "unsafe_without": [], "entry_point": "f"}
    check_reward(Reward("rhymerl.rewards.code", arguments=arguments), ["tests"])
    for text in (
        CODE,
        f"import asyncio, collections, datetime, decimal, json, random, re, sqlite3\n{last_code_block(CODE)}",
    ):
        assert code(text, tests=[{"input": [1], "output": 2}], entry_point="f", memory_mb=64) == 1.0
    assert code(PROGRAM, tests=[{"input": "1", "output": "2"}], memory_mb=64) == 1.0


HAS_MATH = find_spec("math_verify") is not None


@pytest.mark.skipif(not HAS_MATH, reason="needs math-verify: pip install 'rhymerl[math]'")
@pytest.mark.parametrize("where", ["pool", "main"])
def test_math_match(where: Any) -> None:
    cases = {
        r"so it is $\frac{1}{2}$": ("0.5", 1.0),
        r"\boxed{\sqrt{8}}": (r"2\sqrt{2}", 1.0),
        "the answer is 7": ("8", 0.0),
        "nothing": ("8", 0.0),
        r"\boxed{8}": ("$8$", 1.0),
    }
    with RewardScorer([Reward("rhymerl.rewards.math_match", where=where)]) as scorer:
        for text, (answer, _) in cases.items():
            scorer.submit(text, text, {"answer": answer})
        assert {text: each["math_match"] for text, each in scorer.collect().items()} == {
            text: reward for text, (_, reward) in cases.items()
        }
        assert not any(scorer.metrics().values())


@pytest.mark.skipif(not HAS_MATH, reason="needs math-verify: pip install 'rhymerl[math]'")
@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        (r"\boxed{28\%}", "28%", 1),
        ("It fell by 28%.", "28%", 1),
        (r"\boxed{28\%}", r"28\%", 1),
        (r"\boxed{0.28}", "28%", 1),
        (r"\boxed{29\%}", "28%", 0),
        (r"\boxed{18}", "18 dollars", 1),
        (r"\boxed{18 dollars}", "18", 1),
        (r"\boxed{18 \text{ dollars}}", "18 dollars", 1),
        (r"\boxed{19}", "18 dollars", 0),
        (r"\boxed{100000}", "100,000 dollars", 1),
        (r"\boxed{\$18}", "$18", 1),
        (r"\boxed{18}", "\u20ac18", 1),
        (r"\boxed{-5}", "-$5", 1),
        (r"\boxed{5 \text{ cm}^2}", "5 cm^2", 1),
        (r"\boxed{5 cm^2}", "5", 1),
        (r"\boxed{60}", "60 km/h", 1),
        (r"\boxed{30^\circ}", "30\u00b0", 1),
        (r"\boxed{1/2}", "1/2 cup", 1),
        (r"\boxed{1\frac{1}{2}}", "1 1/2", 1),
        (r"\boxed{1.5}", "1 1/2 inches", 1),
        (r"\boxed{1234}", "1 234", 1),
        (r"\boxed{2xy}", "2xy", 1),
        (r"\boxed{2}", "2xy", 0),
        (r"\boxed{2}", "2 xy", 0),
        (r"\boxed{2}", "2 pi", 0),
        (r"\boxed{18}", "18 million", 0),
        (r"\boxed{\text{blue}}", "blue", 1),
        (r"\boxed{blue}", "blue", 1),
        (r"\boxed{lube}", "blue", 0),
        (r"\boxed{\text{New York}}", "New York", 1),
        (r"\boxed{(3, 4)}", "(3, 4)", 1),
        (r"\boxed{72}", 72.0, 1),
        (r"\boxed{0.00001}", 1e-5, 1),
        (r"\boxed{3}", ["3", "4"], ValueError),
        (r"\boxed{3}", None, ValueError),
        (r"\boxed{3}", True, ValueError),
    ],
)
def test_answers_that_are_no_latex(completion: str, answer: object, reward: Any) -> None:
    with pytest.raises(ValueError, match="answer=") if reward is ValueError else nullcontext():
        assert math_match(completion, answer=answer) == reward


@pytest.mark.skipif(not HAS_MATH, reason="needs math-verify: pip install 'rhymerl[math]'")
def test_math_match_in_a_thread_and_as_votes() -> None:
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(math_match, "$1/2$", answer="0.5").result() == 1.0
    extract = Reward("rhymerl.rewards.math_match").extract
    assert extract is not None
    assert extract(r"\boxed{\frac{2}{4}}") == extract(r"\boxed{\frac{1}{2}}") != extract(r"\boxed{3}")
    assert extract("nothing") is None
    with pytest.raises(ValueError, match="no expression"):
        math_match("1", answer=" ")


@pytest.mark.skipif(HAS_MATH, reason="math-verify is installed")
def test_math_match_says_what_to_install() -> None:
    with pytest.raises(ConfigError, match=r"rewards\.math_match\..*pip install 'rhymerl\[math\]'"):
        check_reward(Reward("rhymerl.rewards.math_match"), ["answer"])


@needs_sandbox
def test_the_example_of_programs() -> None:
    """The rows of examples/programs.jsonl under the rewards of configs/grpo_code.yaml."""
    (reward,) = build_rewards(resolved(compose("grpo_code"))["rewards"])
    rows = [json.loads(line) for line in (ROOT / "examples" / "programs.jsonl").read_text().splitlines()]
    right = ["def add(a, b): return a + b", "def is_even(n): return n % 2 == 0", "print(int(input()) ** 2)"]
    wrong = ["def add(a, b): return a", "def is_even(n): return True", "print(16)"]
    with RewardScorer([reward]) as scorer:
        for number, (row, good, bad) in enumerate(zip(rows, right, wrong, strict=True)):
            columns = {name: value for name, value in row.items() if name != "prompt"}
            check_reward(reward, columns)
            scorer.submit(f"{number}/right", f"```python\n{good}\n```", columns)
            scorer.submit(f"{number}/wrong", f"```python\n{bad}\n```", columns)
        scores = scorer.collect()
    assert {key: each["code"] for key, each in scores.items()} == {
        f"{number}/{kind}": float(kind == "right") for number in range(3) for kind in ("right", "wrong")
    }
