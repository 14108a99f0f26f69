"""The ready-made rewards."""

from __future__ import annotations

import pytest

from rhymerl.rewards import exact_match, format_match, length_penalty, numeric_match
from rhymerl.rewards.functions import last_number


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [(" 42\n", "42", 1.0), ("42", 42, 1.0), ("42.", "42", 0.0), ("", "", 1.0)],
)
def test_exact_match(completion: str, answer: object, reward: float) -> None:
    assert exact_match(completion, answer=answer) == reward


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("so 3 + 4 = 7.", 7.0),
        ("it costs $1,234.50 in all", 1234.5),
        ("1,2,3", 3.0),
        ("12,3456", 3456.0),
        ("1,234,567", 1234567.0),
        ("x=5-3", 3.0),
        ("x = -3", -3.0),
        ("x = \u22123", -3.0),
        ("(2)-4", 4.0),
        (".5", 0.5),
        ("-.5", -0.5),
        ("about 3e-2", 0.03),
        ("37+85=122;#122", 122.0),
        (r"\boxed{-17}", -17.0),
        ("50% of 8", 8.0),
        ("H2O", None),
        ("none", None),
    ],
)
def test_last_number(text: str, number: float | None) -> None:
    assert last_number(text) == number


@pytest.mark.parametrize(
    ("completion", "answer", "tolerance", "reward"),
    [
        ("7.0", "7", 0.0, 1.0),
        ("7", 7, 0.0, 1.0),
        ("1234", "1,234", 0.0, 1.0),
        ("0.33", "0.3333", 0.01, 1.0),
        ("0.31", "0.3333", 0.01, 0.0),
        ("no number", "7", 0.0, 0.0),
    ],
)
def test_numeric_match(completion: str, answer: object, tolerance: float, reward: float) -> None:
    assert numeric_match(completion, answer=answer, tolerance=tolerance) == reward


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
