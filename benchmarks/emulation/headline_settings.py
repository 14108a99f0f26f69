"""The main rows of headline.py at other settings, with baselines of their own; the columns are headline.py's.

They are three seeds, an update of 30 % of the first row's step, a model of 32B on four GPUs, a faster GPU, twice as
many requests, and a policy that checks its answers once more as often as chance has it, so that a prompt tells less of
their lengths (policies/doubtful_sum).

    python -m benchmarks.emulation.headline_settings [--only NAME ...] [key=value ...]
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from benchmarks import record
from benchmarks.emulation import headline

SETTINGS: dict[str, dict[str, Any]] = {
    **{f"8B on an H100, seed {seed}": {"seed": seed} for seed in range(3)},
    "8B on an H100, update 30 %": {"update": 0.3},
    "32B on four H100": {"emulate": "h100_32b_tp4", "weights": 2.5},
    "7B on an H200, measured passes": {"emulate": "h200_7b"},
    "64 slots, 32 prompts a step": {"max_running": 64, "prompts": 32},
    "lengths by chance": {"policy": "doubtful_sum", "settings": ["task.typical=4", "task.spread=0.4"]},
}


def main(words: Sequence[str] | None = None) -> dict[str, Any]:
    parser = headline.options(__doc__)
    parser.add_argument("--only", nargs="+", choices=list(SETTINGS), default=list(SETTINGS), metavar="NAME")
    parser.set_defaults(steps=headline.QUICK_STEPS)
    arguments = record.begin(parser, words, threads=1)
    headline.check_steps(parser, arguments, arguments.steps)
    rows = []
    for name in arguments.only:
        changed = argparse.Namespace(**{**vars(arguments), **SETTINGS[name]})
        changed.settings = [*SETTINGS[name].get("settings", []), *arguments.settings]
        rows += [{"setting": name, **row} for row in headline.measured(headline.QUICK, changed, steps=arguments.steps)]
    return record.finish("headline_settings", __doc__, arguments, rows=rows)


if __name__ == "__main__":
    main()
