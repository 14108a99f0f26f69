"""What `rhymerl replay` prints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rhymerl.report.printing import print_table, readable, say
from rhymerl.runs.replay import ASSUMPTION

_COLUMNS = ("tokens_per_pass", "verified_per_token", "accept_rate", "draft_hit_rate", "propose_us")


def report(result: Mapping[str, Any]) -> None:
    """Print a table by epoch and the totals."""
    columns = ["epoch", *(name.replace("_", " ") for name in _COLUMNS)]
    rows = [_row(str(epoch), each) for epoch, each in result["epochs"].items()]
    print_table(columns, rows, title="Replay", total=_row("all", result))
    _say_speedup(result)
    say(
        f"similarity to the epoch before {result['similarity']:.3f}; "
        f"prompts that keep their length group {result['length_same_group']:.3f} (rank correlation "
        f"{result['length_spearman']:.3f})"
    )


def _row(name: str, figures: Mapping[str, Any]) -> list[str]:
    return [name, *(readable(figures[column], digits=3) for column in _COLUMNS)]


def _say_speedup(result: Mapping[str, Any]) -> None:
    source = result["predicted_from"]
    is_assumed = source == ASSUMPTION
    reason = f"assuming that {source}" if is_assumed else f"with the costs of {source}"
    advice = ["costs=FILE takes what rhymerl bench costs --json measures"] if is_assumed else []
    if result["predicted_speedup"] < 1:
        advice.append("below 1 drafts lose: budget=goodput drafts what pays")
    say("; ".join([f"predicted speed-up {result['predicted_speedup']:.2f}, {reason}", *advice]))
