"""The main rows of headline.py at other settings: an update of 30 % of the first row's step, a model of 32B on four GPUs, a faster GPU.

The columns are those of headline.py; each setting has baselines of its own.

    python benchmarks/headline_settings.py [--only NAME ...] [key=value ...]
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import headline
import record

SETTINGS: dict[str, dict[str, Any]] = {
    "8B on an H100, update 30 %": {"update": 0.3},
    "32B on four H100": {"emulate": "h100_32b_tp4"},
    "8B on an H200": {"emulate": "h200_8b"},
}


def main(words: Sequence[str] | None = None) -> dict[str, Any]:
    parser = headline.options(__doc__)
    parser.add_argument("--only", nargs="+", choices=list(SETTINGS), default=list(SETTINGS), metavar="NAME")
    parser.set_defaults(steps=headline.QUICK_STEPS)
    arguments = parser.parse_args(words)
    record.set_threads(arguments.threads or 1)
    start = record.environment()
    rows = []
    for name in arguments.only:
        changed = argparse.Namespace(**{**vars(arguments), **SETTINGS[name]})
        found, _ = headline.measured(headline.QUICK, changed, steps=arguments.steps)
        rows += [{"setting": name, **row} for row in found]
    return record.finish("headline_settings", __doc__, arguments, rows=rows, start=start)


if __name__ == "__main__":
    main()
