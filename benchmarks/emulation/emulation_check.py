"""Emulation against truth: a run on this machine, and on the virtual clock with a curve of the machine's costs.

The curve is measured in runs of other seeds, before and after those that are compared: each pass's tokens, keys and
seconds, to which a line with corners at powers of two, a price of a row's key and one of a token's key are fitted. In
each repeat each row runs twice at `--seed`, once as it is, its rollouts timed by the wall clock, and once by
`headline.py`'s means with that curve; the budget of both is told the curve of the runs before. `seconds` are all
rollouts but the first, which compiles. `over_none` is how many times as fast as without drafts they are, and
`flattered` how much higher that is when it is emulated. A machine on which something else runs is slower than its
curve.

    python -m benchmarks.emulation.emulation_check [key=value ...]
"""

from __future__ import annotations

import json
import sys
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from benchmarks import record
from benchmarks.emulation import headline
from benchmarks.emulation.device import EmulatedBackend, EmulatedDevice, num_keys, num_pairs
from rhymerl.config import compose
from rhymerl.costs import CostCurve
from rhymerl.engine.layout import PassLayout
from rhymerl.runs.fit import fit
from rhymerl.training.module import RhymeModule

ROWS = [headline.Row(drafter, "fifo", "off") for drafter in ("none", "paper", "history_tree")]


Pass = tuple[int, int, int, float]  # tokens, keys of rows, keys of tokens, seconds


@dataclass(slots=True, kw_only=True)
class Stopwatch(EmulatedDevice):
    """Passes take what they take, and are noted."""

    passes: list[Pass] = field(default_factory=list, init=False)

    def wait(self, started: float, layout: PassLayout) -> None:
        """Note a pass."""
        self.passes.append((layout.num_tokens, num_keys(layout), num_pairs(layout), self.now() - started))


class TimedBackend(EmulatedBackend):
    """The embedded engine, whose passes `WATCHES` has."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(emulate=Stopwatch(curve=CostCurve([(1, 1.0), (2, 1.0)])), **settings)
        WATCHES.append(self.device)


WATCHES: list[Stopwatch] = []  # of this process's runs, which the config makes by name


@dataclass(frozen=True, slots=True)
class Measured:
    """A run on this machine."""

    rollouts: list[float]  # wall seconds of each step's
    tokens_a_pass: list[float]  # of each step
    passes: list[Pass]


def run(row: headline.Row, arguments: Any, *, seed: int, steps: int) -> Measured:
    seconds: list[float] = []
    tokens: list[float] = []
    end = RhymeModule.on_train_batch_end

    def on_train_batch_end(module: RhymeModule, *rest: Any) -> None:
        seconds.append(float(module.trainer.callback_metrics["timing_s/rollout"]))
        tokens.append(float(module.trainer.callback_metrics["rollout/spec_accept_length"]))
        end(module, *rest)

    here = Namespace(**{**vars(arguments), "seed": seed})
    backend = [
        "backend._target_=benchmarks.emulation.emulation_check.TimedBackend",
        f"backend.max_running={arguments.max_running}",
    ]
    with tempfile.TemporaryDirectory() as folder, patch.object(RhymeModule, "on_train_batch_end", on_train_batch_end):
        settings = [*headline.settings_of(row, here, steps=steps), *backend, f"run_dir={Path(folder) / 'run'}"]
        fit(compose(headline.config_in(folder), settings))
    return Measured(seconds, tokens, WATCHES[-1].passes)


def fitted(passes: Sequence[Pass]) -> tuple[list[list[float]], tuple[float, float]]:
    """Return [tokens, seconds], and the seconds of a key and of a pair, by least squares."""
    tokens, keys, pairs, seconds = np.array(passes, np.float64).T
    corners = 2.0 ** np.arange(0, np.ceil(np.log2(tokens.max())) + 1)
    hats = np.array([np.interp(tokens, corners, line) for line in np.eye(len(corners))]).T
    seen = hats.sum(axis=0) > len(passes) / 1000  # a corner near which there is next to nothing is its neighbours' line
    corners = corners[seen]
    hats = np.array([np.interp(tokens, corners, line) for line in np.eye(len(corners))]).T
    context, prices = [keys, pairs], np.zeros(2)
    found = [0, 1]
    while True:
        solution = np.linalg.lstsq(np.column_stack([hats, *(context[each] for each in found)]), seconds, rcond=None)[0]
        prices[found] = solution[len(corners) :]
        if (prices >= 0).all():
            break
        prices[cheapest := int(prices.argmin())] = 0.0
        found.remove(cheapest)
    rising = np.maximum.accumulate(np.maximum(solution[: len(corners)], 1e-6))
    costs = [[float(at), float(each)] for at, each in zip(corners, rising, strict=True)]
    return costs, (float(prices[0]), float(prices[1]))


def measured(arguments: Any, *, seed: int) -> list[Pass]:
    """Return passes without and with drafts of runs on this machine, but for the first ones."""
    steps = arguments.epoch_steps + 2
    return [each for row in ROWS[::2] for each in run(row, arguments, seed=seed, steps=steps).passes[64:]]


def write(path: Path, costs: Sequence[Sequence[float]], prices: tuple[float, float]) -> None:
    content = {"costs": costs, "context_s_per_token": prices[0], "context_s_per_pair": prices[1]}
    path.write_text(json.dumps(content))


def main(words: Sequence[str] | None = None) -> dict[str, Any]:
    parser = record.options(
        __doc__, repeats=3, policy="long_sum", max_running=32, prompts=16, epoch_steps=4, steps=12, settings=True
    )
    arguments = record.begin(parser, words, threads=1)
    sizes = {"held_out": 8, "workers": 1, "weights": 0.0, "lengths": 1.0, "trainers": 1}
    given = Namespace(**{**vars(arguments), **sizes})
    sys.modules.setdefault("benchmarks.emulation.emulation_check", sys.modules[__name__])
    with tempfile.TemporaryDirectory() as folder:
        before = measured(given, seed=arguments.seed + 1)
        told, curve = (Path(folder) / f"{name}.json" for name in ("told", "curve"))
        write(told, *fitted(before))
        given.settings = [f"budget.costs={told}", *arguments.settings]
        repeats = range(arguments.repeats)
        reals = [[run(row, given, seed=given.seed, steps=given.steps) for row in ROWS] for _ in repeats]
        costs, (key_s, pair_s) = fitted([*before, *measured(given, seed=arguments.seed + 2)])
        write(curve, costs, (key_s, pair_s))
        given.emulate = str(curve)
        emulated = [[headline.run_row(row, given, update_s=0.0, steps=given.steps) for row in ROWS] for _ in repeats]
    seconds = np.array([[sum(real.rollouts[1:]) for real in repeat] for repeat in reals])
    virtual = np.array([[sum(course.rollouts[1:]) for course in repeat] for repeat in emulated])
    over_none, virtual_over_none = (each[:, :1] / each for each in (seconds, virtual))
    rows = [
        {
            "drafter": row.drafter,
            "seconds": record.spread(seconds[:, at]),
            "emulated_seconds": record.spread(virtual[:, at]),
            "emulated_over_real": record.spread((virtual / seconds)[:, at]),
            "over_none": record.spread(over_none[:, at]),
            "emulated_over_none": record.spread(virtual_over_none[:, at]),
            "flattered": record.spread((virtual_over_none / over_none)[:, at]),
            "tokens_a_pass": round(float(np.mean(reals[0][at].tokens_a_pass[1:])), 3),
            "emulated_tokens_a_pass": round(emulated[0][at].mean("rollout/spec_accept_length"), 3),
            "in_passes": record.spread(
                sum(each[-1] for each in repeat[at].passes) / sum(repeat[at].rollouts) for repeat in reals
            ),
        }
        for at, row in enumerate(ROWS)
    ]
    return record.finish(
        "emulation_check",
        __doc__,
        arguments,
        rows=rows,
        curve=costs,
        microseconds_of_a_key=1e6 * key_s,
        microseconds_of_a_pair=1e6 * pair_s,
    )


if __name__ == "__main__":
    main()
