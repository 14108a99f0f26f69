"""Samples for loggers that show them: text for TensorBoard, a file for CSV, a table for others with `log_table`."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from rhymerl.folders import writing

Row = Mapping[str, Any]

COLUMNS = ("prompt", "response", "reward", "length", "finish_reason")
_FILE = "samples.csv"


def show_samples(logger: Any, rows: Sequence[Row], *, global_step: int) -> None:
    """Show rows of `step`, COLUMNS and perhaps `turns`, on rank 0; a logger that shows no text shows nothing."""
    rows = [{**row, "response": conversation(row["turns"])} if "turns" in row else row for row in rows]
    if not rows:
        return
    if isinstance(logger, TensorBoardLogger):
        logger.experiment.add_text("samples", markdown_table(rows), global_step)
    elif isinstance(logger, CSVLogger):
        _append(Path(logger.log_dir) / _FILE, rows)
    elif callable(log_table := getattr(logger, "log_table", None)):
        columns = ["step", *COLUMNS]
        log_table("samples", columns=columns, data=[[row[name] for name in columns] for row in rows], step=global_step)


def conversation(turns: Sequence[Row]) -> str:
    """Return an episode as text, with who says what."""
    lines = []
    for turn in turns:
        lines.append(f"policy: {turn['text']}")
        reply = turn["reply"].strip()
        if reply or turn["reward"] is not None:
            who = ", ".join(turn["tools"]) or "environment"
            reward = "" if turn["reward"] is None else f" (reward {turn['reward']:.4g})"
            lines.append(f"{who}{reward}" + (f": {reply}" if reply else ""))
    return "\n".join(lines)


def _append(path: Path, rows: Sequence[Row]) -> None:
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        is_new = not path.exists()
        with path.open("a", encoding="utf-8", errors="backslashreplace", newline="") as file:
            writer = csv.DictWriter(file, ["step", *COLUMNS], extrasaction="ignore")
            if is_new:
                writer.writeheader()
            writer.writerows(rows)


def markdown_table(rows: Sequence[Row]) -> str:
    """Return the rows as a Markdown table."""
    lines = [COLUMNS, ["---"] * len(COLUMNS), *([_cell(row[name]) for name in COLUMNS] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", "⏎ ")
