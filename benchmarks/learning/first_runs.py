"""What the runs of docs/first_runs.md learn: held-out reward before and after, and the reward of each step.

A row a config. Rewards of a `deterministic` config follow from its seed and the machine's arithmetic alone, so they can
be taken on a busy machine.

    python -m benchmarks.learning.first_runs [--configs quickstart quickstart_agent] [key=value ...]
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from typing import Any

from benchmarks import record
from benchmarks.regression.guard import events_of


def measured(arguments: Any, *, config: str) -> dict[str, Any]:
    words = ("--config", config, f"seed={arguments.seed}", "report=false", *arguments.settings)
    with record.fitted(*words) as run:
        summary = json.loads((run / "summary.json").read_text())
        rewards = [round(event.value, 3) for event in events_of(run)["reward"]]
    return {
        "steps": summary["steps"],
        "before": round(summary["eval_reward_before"], 3),
        "after": round(summary["eval_reward_after"], 3),
        "reward": rewards,
    }


def main(words: Sequence[str] | None = None) -> dict[str, Any]:
    parser = record.options(__doc__, configs=["quickstart", "quickstart_agent"], settings=True)
    arguments = record.begin(parser, words)
    rows = record.rows_of(record.cases(config=arguments.configs), partial(measured, arguments))
    return record.finish("first_runs", __doc__, arguments, rows=rows)


if __name__ == "__main__":
    main()
