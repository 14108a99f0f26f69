"""Settings of rewards: every mistake is one readable line that names the setting."""

from __future__ import annotations

import functools
import pickle
import pickletools
import re
from collections.abc import Callable
from dataclasses import fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import user_rewards

import rhymerl.rewards
from rhymerl.errors import ConfigError, DataError
from rhymerl.rewards import Reward, build_rewards, check_columns, exact_match, plain_rewards
from rhymerl.training.given_rewards import check_answers
from rhymerl.types import Prompt


def test_defaults() -> None:
    reward = Reward("user_rewards.answered")
    assert (reward.name, reward.weight, reward.where, reward.batch) == ("answered", 1.0, "pool", False)
    assert (reward.default, reward.timeout_s, reward.arguments) == (0.0, 10.0, {})
    assert reward.call is user_rewards.answered
    assert replace(reward, weight=2.0) == Reward("user_rewards.answered", weight=2.0)


@pytest.mark.parametrize(
    ("function", "call"),
    [
        ("user_rewards.Loops.count", user_rewards.Loops.count),
        (user_rewards.Loops.count, user_rewards.Loops.count),
        ("rhymerl.rewards.exact_match", exact_match),
        (exact_match, exact_match),
    ],
)
def test_functions_by_name_and_by_themselves(function: str | Callable[..., float], call: object) -> None:
    assert Reward(function).call is call


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "user_rewards.answerd",
            "function='user_rewards.answerd': user_rewards has no 'answerd'; did you mean answered?",
        ),
        ("user_rewards.Loops.cuont", "Loops has no 'cuont'; did you mean count?"),
        (
            "user_reward.answered",
            "no module named 'user_reward', neither installed nor in the current directory; did you mean user_rewards?",
        ),
        ("rhymerl.reward.exact_match", "rhymerl has no 'reward'; did you mean rewards?"),
        ("rhymerl.rewards.exact_mach", "did you mean exact_match?"),
        ("exact_match", "'my_module.my_function'; did you mean rhymerl.rewards.exact_match?"),
        ("user_rewards.", "expected a dotted name"),
        ("", "expected a dotted name"),
        ("user_rewards.not_a_function", "it is of type int, expected a function"),
        ("user_rewards.only_keywords", "it must take the completion as its first argument"),
        ("broken_module.fn", "failed: ZeroDivisionError: division by zero (broken_module.py:2)"),
        ("needs_missing.fn", "failed: ModuleNotFoundError: No module named 'not_installed'"),
        ("has_syntax_error.fn", "importing 'has_syntax_error' failed: SyntaxError"),
    ],
)
def test_unusable_names(name: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_module.py").write_text("x = 0\n1 / x\n")
    (tmp_path / "needs_missing.py").write_text("import not_installed\n")
    (tmp_path / "has_syntax_error.py").write_text("def fn(:\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ValueError, match="^function=") as error:
        Reward(name)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    with pytest.raises(ConfigError) as located:
        build_rewards({"mine": name})
    assert str(located.value) == f"rewards.mine.{error.value}"


def _local_function() -> Callable[[str], float]:
    def closure(completion: str) -> float:
        return 1.0

    return closure


@pytest.mark.parametrize(
    "function", [_local_function(), lambda completion: 1.0, functools.partial(user_rewards.length)]
)
def test_what_a_reward_process_cannot_import_runs_in_main(function: Callable[..., float]) -> None:
    with pytest.raises(ValueError, match=r"^function=.*cannot import it by name.*where='main'$"):
        Reward(function, where="pool")
    with pytest.raises(ConfigError, match=r"^rewards\.mine\.function=.*cannot import it by name"):
        build_rewards({"mine": {"function": function, "where": "pool"}})
    for spec in (
        function,
        [function],
        {"mine": function},
        {"mine": Reward(function)},
        {"mine": {"function": function}},
    ):
        (reward,) = build_rewards(spec)
        assert (reward.call, reward.where, reward.is_only_here) == (function, "main", True)
    asked = Reward(function, where="main")
    assert (asked.call, asked.is_only_here) == (function, False)
    ours = Reward("user_rewards.length")
    assert (ours.where, ours.is_only_here) == ("pool", False)


def test_functions_of_the_main_script_run_in_main(monkeypatch: pytest.MonkeyPatch) -> None:
    import __main__

    def scripted(completion: str) -> float:
        return 1.0

    scripted.__module__, scripted.__qualname__ = "__main__", "scripted"
    monkeypatch.setattr(__main__, "scripted", scripted, raising=False)
    for function, instead in (
        (scripted, "or pass it as a rhymerl.Reward with where='main'$"),
        ("__main__.scripted", "or set where='main'$"),
    ):
        assert (Reward(function).where, Reward(function).is_only_here) == ("main", True)
        with pytest.raises(ValueError, match=instead):
            Reward(function, where="pool")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"weight": "1"}, "weight='1': expected a finite number"),
        ({"weight": float("nan")}, "weight=nan: expected a finite number"),
        ({"weight": float("inf")}, "weight=inf: expected a finite number"),
        ({"default": float("-inf")}, "default=-inf: expected a finite number"),
        ({"where": "gpu"}, "where='gpu': expected one of pool, main, engine"),
        ({"batch": 1}, "batch=1: expected true or false"),
        ({"default": None}, "default=None: expected a finite number"),
        ({"timeout_s": 0}, "timeout_s=0: expected a number of seconds above 0"),
        ({"name": " "}, "name=' ': expected a name"),
        ({"arguments": {"x": 1}}, "arguments.x: the function has no such parameter"),
    ],
)
def test_values_out_of_range(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Reward("user_rewards.length", **settings)
    with pytest.raises(ConfigError, match=rf"^rewards\.mine\.{re.escape(message)}$"):
        build_rewards({"mine": {"function": "user_rewards.length", **settings}})


def test_check_columns() -> None:
    reward = Reward("user_rewards.answered")
    check_columns(reward, ["id", "answer"])
    check_columns(Reward("user_rewards.count_columns"), [])
    check_columns(Reward("user_rewards.on_device", where="engine"), [])
    check_columns(Reward("user_rewards.answered", arguments={"answer": "4"}), [])
    with pytest.raises(ConfigError) as error:
        check_columns(reward, ["id", "answers"])
    assert str(error.value) == (
        "rewards.answered.function='user_rewards.answered': it needs a column 'answer', and the data set has "
        "id, answers; did you mean answers?"
    )
    with pytest.raises(ConfigError, match="needs a column 'device'"):
        check_columns(Reward("user_rewards.on_device"), ["answer"])


@pytest.mark.parametrize(
    ("spec", "names"),
    [
        (None, []),
        ([], []),
        ("user_rewards.length", ["length"]),
        (user_rewards.length, ["length"]),
        (Reward("user_rewards.length", name="r"), ["r"]),
        ({"r": "user_rewards.length", "s": user_rewards.length, "off": None}, ["r", "s"]),
        ({"r": Reward("user_rewards.length")}, ["r"]),
        ({"r": {"function": "user_rewards.length", "weight": 0.5}}, ["r"]),
        ([Reward("user_rewards.length"), "user_rewards.act"], ["length", "act"]),
    ],
)
def test_build_rewards(spec: Any, names: list[str]) -> None:
    assert [reward.name for reward in build_rewards(spec)] == names


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            {"r": {"function": "user_rewards.length", "wieght": 1}},
            "rewards.r.wieght: unknown field; did you mean",
        ),
        ({"r": {"weight": 1.0}}, "rewards.r.function is missing"),
        ({"r": 3}, "rewards.r=3: expected a dotted name, a function, a Reward or a mapping of its fields"),
        (3, "rewards=3: expected"),
        ({" ": Reward("user_rewards.length")}, "rewards. .name=' ': expected a name"),
        ([{"function": "user_rewards.length", "weight": None}], "rewards.length.weight=None: expected a finite number"),
        ([{"function": "user_rewards.length", "name": "r", "where": "gpu"}], "rewards.r.where='gpu': expected one of"),
        ([Reward("user_rewards.length")] * 2, "rewards.length: 2 rewards have this name"),
    ],
)
def test_build_rewards_refuses(spec: Any, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        build_rewards(spec)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    "spec",
    [
        None,
        "user_rewards.length",
        user_rewards.length,
        exact_match,
        user_rewards.Loops.count,
        Reward(user_rewards.length, name="r", weight=0.5),
        [user_rewards.length, Reward(user_rewards.act, where="main"), {"function": exact_match, "name": "e"}],
        (user_rewards.length,),
        {"r": user_rewards.length, "s": Reward(user_rewards.act, timeout_s=np.float64(2)), "off": None},
        {"r": {"function": user_rewards.answered, "weight": 2, "arguments": {"answer": ["a", (1, None)]}}},
    ],
)
def test_plain_rewards_are_the_same_rewards(spec: Any) -> None:
    def told(rewards: list[Reward]) -> list[dict[str, Any]]:
        return [
            {"call": reward.call} | {f.name: getattr(reward, f.name) for f in fields(Reward) if f.name != "function"}
            for reward in rewards
        ]

    plain = plain_rewards(spec)
    assert told(build_rewards(plain)) == told(build_rewards(spec))
    assert pickle_words(plain) == set(), "nothing but containers, strings and numbers"
    assert plain_rewards(plain) == plain


def pickle_words(value: Any) -> set[str]:
    """The names that unpickling would import."""
    found = pickletools.genops(pickle.dumps(value, protocol=2))
    return {str(argument) for opcode, argument, _ in found if opcode.name == "GLOBAL"}


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (lambda completion: 1.0, "<lambda> cannot be imported by name"),
        (_local_function(), "_local_function.<locals>.closure cannot be imported by name"),
        ([user_rewards.length, functools.partial(user_rewards.length)], "a partial cannot be imported by name"),
        ({"r": Reward(lambda completion: 1.0, where="main")}, "<lambda> cannot be imported by name"),
        ({"r": {"function": exact_match, "arguments": {"answer": user_rewards.length}}}, "a function is among its"),
        (3, "a int cannot be imported by name"),
    ],
)
def test_what_cannot_be_written_plainly(spec: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        plain_rewards(spec)


def test_exports_are_sorted_and_there() -> None:
    assert rhymerl.rewards.__all__ == sorted(rhymerl.rewards.__all__)
    assert all(hasattr(rhymerl.rewards, name) for name in rhymerl.rewards.__all__)
    with pytest.raises(AttributeError, match="nothing"):
        rhymerl.rewards.nothing  # noqa: B018


def rows(*answers: object) -> list[Prompt]:
    return [
        Prompt(
            id=str(line),
            key="",
            token_ids=np.zeros(1, np.int32),
            text="",
            columns={"answer": answer},
            location=f"row {line}",
        )
        for line, answer in enumerate(answers, start=1)
    ]


@pytest.mark.parametrize(
    ("function", "answers", "message"),
    [
        ("exact_match", ["1", None, ["1", "2"], 3.0], "row 2: answer=None: expected a text or a number; 2 of the 4 rows have"),
        ("exact_match", ["1", True], "row 2: answer=True: expected a text or a number; 1 of the 2 rows have"),
        ("exact_match", ["1", 2, 3.0, ""], ""),
        ("numeric_match", ["1", "two", 3], "row 2: answer='two': expected a number; 1 of the 3 rows have"),
        ("numeric_match", ["1", "-1,234.5", 3.0], ""),
    ],
)  # fmt: skip
def test_rows_whose_answer_nothing_matches_are_refused(function: str, answers: list[object], message: str) -> None:
    reward = Reward(f"rhymerl.rewards.{function}", name="right")
    if not message:
        assert check_answers(reward, rows(*answers)) == []
        return
    with pytest.raises(DataError) as error:
        check_answers(reward, rows(*answers))
    whole = f"{message} an answer that rewards.right.function='rhymerl.rewards.{function}' cannot match with anything"
    assert str(error.value) == whole


@pytest.mark.skipif(find_spec("math_verify") is None, reason="needs math-verify: pip install 'rhymerl[math]'")
def test_rows_whose_answers_are_compared_as_text_are_counted() -> None:
    reward = Reward("rhymerl.rewards.math_match")
    assert check_answers(reward, rows("28%", r"\frac{1}{2}", "18 dollars", 7, "x + y")) == []
    assert check_answers(reward, rows("1", "blue", "July 4", "blue")) == [
        "rewards.math_match.function='rhymerl.rewards.math_match': the answers of 3 of the 4 rows can be compared as text only, "
        "the first at row 2: 'blue'"
    ]
    with pytest.raises(DataError, match="row 1: answer=None: expected a text or a number; 1 of the 2 rows have"):
        check_answers(reward, rows(None, "1"))


def test_other_rewards_try_no_answer() -> None:
    assert check_answers(Reward("user_rewards.answered"), rows(None)) == []
    assert check_answers(Reward("rhymerl.rewards.exact_match", arguments={"answer": "1"}), rows(None)) == []
