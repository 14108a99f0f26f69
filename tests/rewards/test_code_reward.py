"""The reward that runs an answer's code: which code that is, what its tests say, and what is refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from rhymerl.config import compose, resolved
from rhymerl.errors import ConfigError
from rhymerl.rewards import Reward, RewardScorer, build_rewards, check_reward, code
from rhymerl.rewards.programs import last_code_block
from rhymerl.rewards.sandbox.run import missing_walls

ROOT = Path(__file__).parents[2]
needs_sandbox = pytest.mark.skipif(
    sys.platform != "linux" or bool(missing_walls()), reason="this machine offers no namespaces or no seccomp"
)


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
