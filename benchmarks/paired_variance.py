"""The variance of the difference in reward between two learning rates: forks of a run beside runs of other seeds.

For each of --seeds seeds, `rhymerl fit --config quickstart` trains at --learning-rate, and `rhymerl fork RUN@0` at --other: the same prompts
and the same noise at each step. A row is a window of steps. Variances are means over its steps:

- paired, unpaired: of one step's difference in mean reward, from how rewards vary over the step's prompts; of a run and its fork, and of a
  run and the fork of another seed. `ratio` is unpaired over paired, its range that of the seeds;
- paired_seeds, unpaired_seeds: of that difference over the seeds, which has the chance of the training before it in it.

    python benchmarks/paired_variance.py
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import record

from rhymerl.report import read_run
from rhymerl.report.base import Run
from rhymerl.report.paired import paired_difference

WINDOW = 10  # steps
GOAL = 2.0  # unpaired over paired, in the first window


def rhymerl(folder: Path, *words: str, threads: int) -> None:
    """Run a command that leaves a run in `folder`, unless one is finished there."""
    if (folder / "summary.json").exists():
        return
    command = [
        sys.executable,
        "-m",
        "rhymerl",
        *words,
        f"run_dir={folder}",
        "trainer.limit_val_batches=0",
        "checkpoint.every_n_steps=1000",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    subprocess.run(command, check=True, stdout=sys.stderr, env=environment)


def train(folder: Path, arguments: Any) -> list[tuple[Run, Run]]:
    """A run and its fork for each seed."""
    pairs = []
    for seed in range(arguments.seed, arguments.seed + arguments.seeds):
        first, second = folder / f"{seed}", folder / f"{seed}-fork"
        words = [
            f"seed={seed}",
            f"trainer.max_steps={arguments.steps}",
            f"update.learning_rate={arguments.learning_rate}",
        ]
        threads = arguments.threads or 1
        rhymerl(first, "fit", "--config", "quickstart", *words, threads=threads)
        rhymerl(second, "fork", f"{first}@0", f"update.learning_rate={arguments.other}", threads=threads)
        pairs.append((read_run(first), read_run(second)))
    return pairs


def rewards(run: Run) -> np.ndarray:
    """The mean reward of each step's prompts, [steps, prompts]."""
    assert run.answers is not None
    step, prompt, reward = run.answers.step, run.answers.prompt, run.answers.reward
    found = []
    for each in np.unique(step):
        mine = step == each
        _, index = np.unique(prompt[mine], return_inverse=True)
        found.append(np.bincount(index, reward[mine]) / np.bincount(index))
    return np.array(found)


def variances(pairs: Sequence[tuple[Run, Run]]) -> dict[str, np.ndarray]:
    """By seed and step, [seeds, steps]; over the seeds, [steps]."""
    paired = [paired_difference(*pair) for pair in pairs]
    assert all(each is not None for each in paired)
    firsts, seconds = (np.array([rewards(pair[which]) for pair in pairs]) for which in (0, 1))
    own, theirs = (each.var(axis=2, ddof=1) / each.shape[2] for each in (firsts, seconds))
    others = (theirs.sum(axis=0) - theirs) / (len(pairs) - 1)  # the mean over the forks of the other seeds
    means, forked = firsts.mean(axis=2), seconds.mean(axis=2)
    return {
        "paired": np.array([each.variance for each in paired if each is not None]),
        "unpaired": own + others,
        "paired_seeds": (forked - means).var(axis=0, ddof=1),
        "unpaired_seeds": means.var(axis=0, ddof=1) + forked.var(axis=0, ddof=1),
        "difference": (forked - means).mean(axis=0),
    }


def row(found: dict[str, np.ndarray], steps: slice) -> dict[str, Any]:
    inside = {name: values[..., steps].mean(axis=-1) for name, values in found.items()}
    return {
        "steps": f"{steps.start + 1} to {steps.stop}",
        "difference": round(float(inside["difference"]), 4),
        **{name: float(f"{inside[name].mean():.3g}") for name in ("paired", "unpaired")},
        "ratio": record.spread(inside["unpaired"] / inside["paired"]),
        **{name: float(f"{inside[name]:.3g}") for name in ("paired_seeds", "unpaired_seeds")},
        "ratio_seeds": round(float(inside["unpaired_seeds"] / inside["paired_seeds"]), 2),
    }


def main(words: Sequence[str] | None = None) -> dict[str, Any]:
    parser = record.options(__doc__)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--learning-rate", default="3e-4")
    parser.add_argument("--other", default="1e-4", help="the learning rate of the forks")
    parser.add_argument(
        "--runs", type=Path, help="folder for the runs; those that are finished there are not trained again"
    )
    arguments = parser.parse_args(words)
    if arguments.seeds < 2 or arguments.steps < WINDOW:
        parser.error(f"--seeds={arguments.seeds} --steps={arguments.steps}: expected at least 2 and {WINDOW}")
    start = record.environment()
    with tempfile.TemporaryDirectory() as folder:
        found = variances(train(arguments.runs or Path(folder), arguments))
    rows = [row(found, slice(begin, begin + WINDOW)) for begin in range(0, arguments.steps - WINDOW + 1, WINDOW)]
    by_step = found["unpaired"].mean(axis=0)[1:] / found["paired"].mean(axis=0)[1:]  # the first step is the same
    return record.finish(
        "paired_variance",
        __doc__,
        arguments,
        rows=rows,
        start=start,
        goal_of_first_row=GOAL,
        ratio_by_step_from_the_second=[round(float(each), 2) for each in by_step],
    )


if __name__ == "__main__":
    main()
