"""Rollout speed with each drafter against none, on the same requests and seeds; `rhymerl bench rollout` with a result file.

A row is a drafter at a number of running requests: speed-up (median of the pairs, and its 95 % interval), the share of what
an oracle reaches that is given the answers, and the speed-up that replay and the measured costs of passes predict.

    python benchmarks/rollout_speed.py [key=value ...]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import record

from rhymerl.bench.rollout import RolloutBench
from rhymerl.config import compose


def main(words: Sequence[str] | None = None) -> dict[str, Any]:
    parser = record.options(__doc__)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings of configs/bench_rollout.yaml")
    arguments = parser.parse_args(words)
    record.set_threads(arguments.threads)
    start = record.environment()
    result = RolloutBench(compose("bench_rollout", [*arguments.overrides, f"seed={arguments.seed}"])).run()
    rows = [{name: rounded(value) for name, value in row.items()} for row in result["rows"]]
    return record.finish("rollout_speed", __doc__, arguments, rows=rows, start=start, costs=result["costs"])


def rounded(value: Any) -> Any:
    """Four digits; nothing where there is no value."""
    return "" if value is None else float(f"{value:.4g}") if isinstance(value, float) else value


if __name__ == "__main__":
    main()
