"""Rollouts with an environment that takes seconds: asked each time, and with the memory of replies.

The running sum whose steps are checked (`configs/quickstart_agent.yaml`) in small steps, with a checker that sleeps. By
pass over the problems: `rollout_s` of all its rollouts, the share of replies from memory (`remembered`), the seconds
that their calls took (`saved_s`), and how long an episode waited for a reply (`wait_s`).

    python -m benchmarks.environments.slow_tools [--seconds 0.1 1 5] [--passes 4]
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import record
from benchmarks.regression.guard import events_of
from rhymerl.tasks import CheckedSum

STEPS = 2  # of a pass
MEMORY_MB = {"asked": 0, "memory": 64}


@dataclass(kw_only=True, eq=False)
class SlowSum(CheckedSum):
    """The checker takes `seconds`."""

    seconds: float = 0.0

    def reply(self, row: Any, turns: Sequence[Any]) -> str | None:
        time.sleep(self.seconds)
        return super().reply(row, turns)


def passes(seconds: float, mode: str, arguments: Any) -> Iterator[dict[str, Any]]:
    """Yield a row a pass over the problems of a run."""
    with tempfile.TemporaryDirectory(prefix="rhymerl-slow-tools-") as folder:
        settings = [
            f"run_dir={folder}/run",
            f"seed={arguments.seed}",
            "task=benchmarks.environments.slow_tools.SlowSum",
            f"task.seconds={seconds}",
            f"task.train_size={8 * STEPS}",
            "data.prompts_per_step=8",
            f"trainer.max_steps={STEPS * arguments.passes}",
            "deterministic=false",  # else all replies are waited for between passes
            "trainer.limit_val_batches=0",
            "report=false",
            f"rollout.reply_memory_mb={MEMORY_MB[mode]}",
            *arguments.settings,
        ]
        command = [sys.executable, "-m", "rhymerl", "fit", "--config", "quickstart_agent", *settings]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        events = {name: [each.value for each in found] for name, found in events_of(Path(folder) / "run").items()}

    def of(name: str, number: int) -> list[float]:
        return events[name][STEPS * number : STEPS * (number + 1)]

    for number in range(arguments.passes):
        yield {
            "seconds": seconds,
            "mode": mode,
            "pass": number + 1,
            "rollout_s": round(sum(of("timing_s/rollout", number)), 2),
            "remembered": round(statistics.mean(of("environment/remembered_frac", number)), 3),
            "saved_s": round(sum(of("environment/saved_s", number)), 1),
            "wait_s": round(statistics.mean(of("environment/wait_s", number)), 3),
            "turns": round(statistics.mean(of("episodes/turns", number)), 2),
            "reward": round(statistics.mean(of("reward", number)), 4),
        }


def main(words: Sequence[str] | None = None) -> dict[str, Any]:
    parser = record.options(__doc__)
    parser.add_argument("--seconds", type=float, nargs="+", default=[0.1, 1.0, 5.0], help="that a reply takes")
    parser.add_argument("--passes", type=int, default=4, help="over the problems")
    parser.add_argument("settings", nargs="*", metavar="key=value")
    arguments = parser.parse_args(words)
    record.set_threads(arguments.threads)
    start = record.environment()
    rows = []
    for seconds in arguments.seconds:
        for mode in MEMORY_MB:
            for row in passes(seconds, mode, arguments):
                record.note_row(row)
                rows.append(row)
    return record.finish("slow_tools", __doc__, arguments, rows=rows, start=start)


if __name__ == "__main__":
    main()
