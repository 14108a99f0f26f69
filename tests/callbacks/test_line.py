"""The line of a run on a terminal, and the answers below it: what is left out where there is little room."""

from __future__ import annotations

import pytest
from rich.cells import cell_len

from rhymerl.callbacks.progress import fitted, parts_of
from rhymerl.callbacks.samples import shortened

METRICS = {
    "reward": 0.4123,
    "completions/mean_length": 43.07,
    "rollout/tokens_per_s": 5210.4,
    "perf/peak_memory_gb": 12.34,
    "loss": 1.0,
}
PARTS = {
    "step": "step 12/100",
    "bar": "━━━─────────────────────",
    **parts_of(METRICS),
    "elapsed": "0:01:23",
    "left": "12 min left",
}


@pytest.mark.parametrize(
    ("columns", "line"),
    [
        (
            120,
            "step 12/100  ━━━─────────────────────  reward 0.412  length 43.1  5,210 tok/s  12.3 GB  0:01:23  12 min left",
        ),
        (82, "step 12/100  reward 0.412  length 43.1  5,210 tok/s  12.3 GB  0:01:23  12 min left"),
        (81, "step 12/100  reward 0.412  length 43.1  5,210 tok/s  12.3 GB  12 min left"),
        (60, "step 12/100  reward 0.412  5,210 tok/s  12.3 GB  12 min left"),
        (59, "step 12/100  reward 0.412  12.3 GB  12 min left"),
        (46, "step 12/100  reward 0.412  12 min left"),
    ],
)
def test_the_bar_goes_first(columns: int, line: str) -> None:
    assert fitted(PARTS, columns) == line
    assert len(line) <= columns


def test_metrics_that_are_not_logged_have_no_part() -> None:
    assert parts_of({"loss": 1.5}) == {"loss": "loss 1.5000"}
    assert list(parts_of(METRICS)) == ["reward", "length", "speed", "memory"]


@pytest.mark.parametrize(
    ("text", "columns", "line"),
    [
        ("What is\n 4 + 4?\t", 20, "What is 4 + 4?"),
        ("abcdefghij", 10, "abcdefghij"),
        ("abcdefghijk", 10, "abcd … ijk"),
        ("二二二二二二", 10, "二二 …  二"),
        ("\x1b[31mred\x07\ud800", 20, "�[31mred��"),
        ("abc\u202edef", 20, "abc�def"),
    ],
)
def test_an_answer_is_a_line_that_no_terminal_obeys(text: str, columns: int, line: str) -> None:
    assert shortened(text, columns) == line
    assert cell_len(shortened(text, columns)) <= columns
