"""What `rhymerl replay` prints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from rhymerl.runs.replay import ASSUMPTION

_COLUMNS = ("tokens_per_pass", "verified_per_token", "accept_rate", "draft_hit_rate", "propose_us")


def report(result: Mapping[str, Any]) -> None:
    """Print a table by epoch and the totals."""
    table = Table(title="Replay", title_justify="left")
    for name in ("epoch", *_COLUMNS):
        table.add_column(name.replace("_", " "), justify="right")
    for epoch, each in result["epochs"].items():
        table.add_row(str(epoch), *(_shown(each[name]) for name in _COLUMNS))
    table.add_section()
    table.add_row("all", *(_shown(result[name]) for name in _COLUMNS), style="bold")
    console = Console()
    console.print(table)
    _say_speedup(result, console)
    console.print(
        f"similarity to the epoch before {result['similarity']:.3f}; "
        f"prompts that keep their length group {result['length_same_group']:.3f} (rank correlation "
        f"{result['length_spearman']:.3f})",
        highlight=False,
        soft_wrap=True,
    )


def _shown(value: float) -> str:
    """Three digits, or all of those before the point: `0.523`, `1,910`."""
    return f"{value:.3g}" if abs(value) < 999.5 else f"{value:,.0f}"


def _say_speedup(result: Mapping[str, Any], console: Console) -> None:
    source = result["predicted_from"]
    is_assumed = source == ASSUMPTION
    reason = f"assuming that {source}" if is_assumed else f"with the costs of {source}"
    advice = ["costs=FILE takes what rhymerl bench costs --json measures"] if is_assumed else []
    if result["predicted_speedup"] < 1:
        advice.append("below 1 drafts lose: budget=goodput drafts what pays")
    words = "; ".join([f"predicted speed-up {result['predicted_speedup']:.2f}, {reason}", *advice])
    console.print(words, highlight=False, soft_wrap=True)
