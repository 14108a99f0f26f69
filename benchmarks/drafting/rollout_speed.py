"""Rollout speed with each drafter against none, on the same requests and seeds: `rhymerl bench rollout`, recorded.

python -m benchmarks.drafting.rollout_speed [key=value ...]
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks import record


def main(words: Sequence[str] | None = None) -> dict[str, Any]:
    arguments = record.begin(record.options(__doc__, settings=True), words)
    command = [sys.executable, "-m", "rhymerl", "bench", "rollout", "--json", *arguments.settings]
    printed = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout
    rows = [{name: _short(value) for name, value in row.items()} for row in json.loads(printed)["rows"]]
    return record.finish("rollout_speed", __doc__, arguments, rows=rows)


def _short(value: Any) -> Any:
    """To four digits; an empty cell where there is no value."""
    return "" if value is None else float(f"{value:.4g}") if isinstance(value, float) else value


if __name__ == "__main__":
    main()
