"""Calls a second of rewards that run an answer's code, beside a plain interpreter for each answer.

--answers answers of a few lines with three tests each, by --processes reward processes, interleaved; the first round, in which
processes start, is not counted, spreads are over the repeats.

- plain: `python -c` of code and tests, without any wall; its answers could do whatever this program may;
- code: the reward `code`, with all walls;
- bare: a reward that does nothing, which is the pool's own share of the others.

    python benchmarks/code_rewards.py [--answers 200] [--processes 2]
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import record

from rhymerl.rewards import Reward, RewardScorer

ANSWER = "```python\ndef add(a, b):\n    total = a\n    for _ in range(abs(b)):\n        total += 1 if b > 0 else -1\n    return total\n```"
TESTS = "assert add(1, 2) == 3\nassert add(5, -2) == 3\nassert add(-1, 0) == -1"
WAYS = {"plain": "code_rewards.plain", "code": "rhymerl.rewards.code", "bare": "code_rewards.bare"}


def plain(completion: str, *, tests: str) -> float:
    code = completion.strip("`").removeprefix("python")
    done = subprocess.run([sys.executable, "-I", "-c", f"{code}\n{tests}"], capture_output=True, timeout=20)
    return float(done.returncode == 0)


def bare(completion: str, *, tests: str) -> float:
    return 1.0


def score(scorer: RewardScorer, number: int) -> None:
    """Raises RuntimeError unless all answers are right."""
    for key in range(number):
        scorer.submit(str(key), ANSWER, {"tests": TESTS})
    rewards = {reward for each in scorer.collect().values() for reward in each.values()}
    if rewards != {1.0}:
        raise RuntimeError(f"right answers got {rewards}")


def main(words: Sequence[str] | None = None) -> dict[str, Any]:
    parser = record.options(__doc__, repeats=5)
    parser.add_argument("--answers", type=int, default=200)
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args(words)
    start = record.environment()
    with ExitStack() as stack:
        measures: dict[str, Callable[[], float]] = {}
        for way, function in WAYS.items():
            reward = Reward(function, name=way, timeout_s=60)
            scorer = stack.enter_context(RewardScorer([reward], num_processes=arguments.processes))
            measures[way] = partial(record.seconds, partial(score, scorer, arguments.answers))
        taken = record.interleaved(measures, repeats=arguments.repeats)
    rows = [
        {
            "way": way,
            "calls_per_s": record.spread(arguments.answers / value for value in values),
            "times as fast as plain": record.spread(a / b for a, b in zip(taken["plain"], values, strict=True)),
        }
        for way, values in taken.items()
    ]
    return record.finish("code_rewards", __doc__, arguments, rows=rows, start=start)


if __name__ == "__main__":
    main()
