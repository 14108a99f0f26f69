"""What `rhymerl replay` prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isnan
from pathlib import Path
from typing import Any

from rhymerl.progress import counted
from rhymerl.report.charts import Chart, Series
from rhymerl.report.charts.base import run_colour
from rhymerl.report.printing import print_table, readable, say
from rhymerl.runs.judging import ASSUMPTION

_COLUMNS = ("tokens_per_pass", "verified_per_token", "accept_rate", "draft_hit_rate", "propose_us")
_PLAIN = dict.fromkeys((*_COLUMNS, "predicted_speedup"), 0.0) | dict.fromkeys(
    ("tokens_per_pass", "verified_per_token", "predicted_speedup"), 1.0
)  # without drafts


def report(result: Mapping[str, Any]) -> None:
    """Print a table by epoch and the totals."""
    columns = ["epoch", *(name.replace("_", " ") for name in _COLUMNS)]
    rows = [_row(str(epoch), each) for epoch, each in result["epochs"].items()]
    print_table(columns, rows, title="Replay", total=_row("all", result))
    _say_speedup(result, [result["predicted_speedup"]])
    _say_answers(result)


def report_several(result: Mapping[str, Any]) -> None:
    """Print a table by drafter, below plain decoding, on the same answers."""
    columns = ["drafter", *(name.replace("_", " ") for name in _PLAIN)]
    drafters = {"none": _PLAIN, **result["drafters"]}
    rows = [_row(name, each, tuple(_PLAIN)) for name, each in drafters.items()]
    print_table(columns, rows, title="Replay", left=("drafter",))
    _say_speedup(result, [each["predicted_speedup"] for each in result["drafters"].values()])
    _say_answers(result)


def draw(drafters: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Draw the acceptance length by epoch, a line a drafter, as PNG."""
    from rhymerl.report.pictures import draw_chart

    series = [
        Series(
            name=name,
            x=list(each["epochs"]),
            y=[epoch["tokens_per_pass"] for epoch in each["epochs"].values()],
            colour=run_colour(number),
        )
        for number, (name, each) in enumerate(drafters.items())
    ]
    draw_chart(
        Chart(
            id="replay",
            title="Acceptance length in a replay",
            caption="Tokens a pass emits for a request; without drafts it is 1.",
            x_title="epoch",
            y_title="tokens per pass",
            series=series,
            reference=1.0,
        ),
        path,
    )


def _row(name: str, figures: Mapping[str, Any], columns: Sequence[str] = _COLUMNS) -> list[str]:
    return [name, *(readable(figures[column], digits=3) for column in columns)]


def _say_speedup(result: Mapping[str, Any], speedups: Sequence[float]) -> None:
    source = result["predicted_from"]
    is_assumed = source == ASSUMPTION
    reason = f"assuming that {source}" if is_assumed else f"with the costs of {source}"
    advice = ["costs=FILE takes what rhymerl bench costs --json measures"] if is_assumed else []
    if min(speedups) < 1:
        advice.append("below 1 drafts lose: budget=goodput drafts what pays")
    figure = f" {speedups[0]:.2f}" if len(speedups) == 1 else "s"
    say("; ".join([f"predicted speed-up{figure}, {reason}", *advice]))


def _say_answers(result: Mapping[str, Any]) -> None:
    if result["answers"] < result["recorded_answers"]:
        say(
            f"{result['answers']:,} of {counted(result['recorded_answers'], 'answer')} replayed, the others learned from"
        )
    if not isnan(result["similarity"]):
        say(
            f"similarity to the epoch before {result['similarity']:.3f}; "
            f"prompts that keep their length group {result['length_same_group']:.3f} (rank correlation "
            f"{result['length_spearman']:.3f})"
        )
