"""What the runs of docs/first_runs.md learn: held-out reward before and after, and the reward of each step.

A row a config. Rewards of a `deterministic` config follow from its seed and the machine's arithmetic alone, so they can
be taken on a busy machine.

    python -m benchmarks.learning.first_runs [--configs quickstart quickstart_agent] [key=value ...]
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import record
from benchmarks.regression.guard import events_of


def measured(arguments: Any, *, config: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="rhymerl-first-") as folder:
        run = Path(folder, "run")
        words = ("--config", config, f"seed={arguments.seed}", f"run_dir={run}", "report=false", *arguments.settings)
        subprocess.run([sys.executable, "-m", "rhymerl", "fit", *words], check=True, stdout=2)  # as stderr
        summary = json.loads((run / "summary.json").read_text())
        rewards = [round(event.value, 3) for event in events_of(run)["reward"]]
    return {
        "steps": summary["steps"],
        "before": round(summary["eval_reward_before"], 3),
        "after": round(summary["eval_reward_after"], 3),
        "reward": rewards,
    }


def main(words: Sequence[str] | None = None) -> dict[str, Any]:
    parser = record.options(__doc__)
    parser.add_argument("--configs", nargs="+", default=["quickstart", "quickstart_agent"], metavar="NAME")
    parser.add_argument("settings", nargs="*", metavar="key=value")
    arguments = parser.parse_args(words)
    cases = [{"config": name} for name in arguments.configs]
    return record.measure_cases("first_runs", __doc__, arguments, cases, partial(measured, arguments))


if __name__ == "__main__":
    main()
