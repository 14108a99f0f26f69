"""What history brings to a whole training run: the real program on emulated accelerators and a virtual clock.

Four workers answer, and a trainer with `--trainers` devices of its own updates the policy, from the same start in every
row: drafter, scheduler and mode of run_ahead differ. In the row "colocated" as many devices in all answer and update in
turn. The task is `long_sum`, whose answers of up to 448 tokens have a long tail; each of them stands for `--lengths` of
the emulated device's tokens, so that keys and values weigh what they weigh there. Passes cost what `--emulate` says,
everything that is done beside the model in a worker costs the CPU time that it took its thread here (virtual.py), and
an update costs so much a token that it is `--update` of a step of the first row. The paper's drafter has the paper's
budget, `aimd`, and ours `goodput`. The rows "one width" have SGLang's rule: all requests of a pass have as many nodes,
chosen pass by pass among a few numbers, and drafts that have fewer are padded, which costs what nodes cost. The other
rows are those of an engine that verifies as many nodes of each request as pay for it, as the embedded one does.

A row's seconds are those from the start to the last step on the trainer's clock: rollouts, updates, and the CPU time of
whatever the trainer does beside the update between rollouts and until the requests of a rollout are out. `over_barrier`
compares them with no drafts, FIFO and a barrier, `over_colocated` with the same on colocated devices;
`over_one_step_off` with no drafts, FIFO and a rollout that runs while the policy of the one before is trained, at whose
end all workers wait for the last answer: the pipeline of veRL's one-step-off recipe, which is the baseline of the
RhymeRL paper. `to_held_out` compares the times at which problems that are not trained on had nine tenths of what the
barrier's row gains on them: the policy after each epoch, at `epochs_s`, answers `--judged` of them, whose rewards from
the start on are `held_out`, `held_out_error` being the standard error of one at most. Between epochs they lie on a
line, and the lines that never fall are compared. `to_reward` compares the times at which the reward of an epoch's
answers first was what the barrier's row had then. `bound` is what the row would reach with full workers, whose passes
verify no node in vain, and no CPU time beside the passes: the sum of this work, beside the updates or with them.
`length_correlation` is that of a prompt's mean length with the one in the epoch before. `lost` says where the workers'
time goes, in parts of it: nodes (that drafts add to passes and that are rejected), padding (nodes that nothing can
reach), draft (CPU), beside (the other CPU time), weights; and without work: update (while the trainer updates), trainer
(while it does whatever else it does between rollouts), bubbles (while other workers decode).

`--emulate` is the name of a file in benchmarks/emulated/, or a path, and `--policy` that of a folder in
benchmarks/policies/; `--prompts` are those of a step. A load of weights takes `--weights` seconds of the device (SGLang
takes 2.5 for a model of 30B, by its pull request 13824). `--held-out` problems are evaluated at start and end.

    python -m benchmarks.emulation.headline [--quick] [--rows NAME ...] [key=value ...]
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import record
from benchmarks.emulation.course import Course
from rhymerl.backends.sglang.nodes import widths_to
from rhymerl.config import compose
from rhymerl.runs.fit import evaluate, fit


@dataclass(frozen=True, slots=True)
class Row:
    """One factor after another."""

    drafter: str
    scheduler: str
    run_ahead: str
    mode: str = ""  # other than that of run_ahead
    budget: str = "GoodputBudget"
    widths: tuple[int, ...] = ()  # the numbers of nodes that all requests of a pass may have

    @property
    def name(self) -> str:
        other = ", goodput" if self.drafter == "paper" and self.budget == "GoodputBudget" else ""
        width = ", one width" if self.widths else ""
        return f"{self.drafter}, {self.scheduler}, {self.mode or self.run_ahead}{other}{width}"

    @property
    def is_colocated(self) -> bool:
        return self.mode == _COLOCATED

    @property
    def settings(self) -> list[str]:
        return [
            f"drafter={self.drafter}",
            f"scheduler={self.scheduler}",
            f"run_ahead='{self.run_ahead}'",
            f"budget={{_target_: rhymerl.budgets.{self.budget}{f', widths: {list(self.widths)}' if self.widths else ''}}}",
        ]

    @classmethod
    def of_one_width(cls, drafter: str, scheduler: str, run_ahead: str) -> Row:
        """Return a row as in SGLang, with at most 16 nodes."""
        return cls(drafter, scheduler, run_ahead, budget="UniformGoodputBudget", widths=widths_to(16))

    def num_workers(self, arguments: Any) -> int:
        return int(arguments.workers + (arguments.trainers if self.is_colocated else 0))


_GAIN = 0.9  # of a held-out reward's rise: the last tenth is within its noise
_COLOCATED = "colocated"
_ONE_STEP_OFF = "one step off"  # with a barrier between rollouts, but none between a rollout and an update
BARRIER = Row("none", "fifo", "off")
COLOCATED = Row("none", "fifo", "off", _COLOCATED)
ONE_STEP_OFF = Row("none", "fifo", "keep", _ONE_STEP_OFF)
BASELINES = [BARRIER, COLOCATED, ONE_STEP_OFF]
ROWS = [
    *BASELINES,
    Row("none", "fifo", "keep"),
    Row("none", "histopipe", "keep"),
    Row("paper", "fifo", "off", budget="AIMDBudget"),
    Row("paper", "histopipe", "keep", budget="AIMDBudget"),
    Row("paper", "histopipe", "keep"),
    Row("history_tree", "fifo", "off"),
    Row("history_tree", "fifo", "off", _COLOCATED),
    Row("history_tree", "sorted", "off"),
    Row("history_tree", "sorted", "draft"),
    Row("history_tree", "packed", "draft"),
    Row("history_tree", "fifo", "keep"),
    Row("history_tree", "sorted", "keep"),
    Row("history_tree", "histopipe", "keep"),
    Row("history_tree", "packed", "keep"),
    Row("history_tree", "paced", "keep"),
    Row.of_one_width("history_tree", "fifo", "off"),
    Row.of_one_width("history_tree", "packed", "draft"),
    Row.of_one_width("history_tree", "packed", "keep"),
]
QUICK_STEPS = 12
QUICK = [
    *BASELINES,
    Row("paper", "histopipe", "keep", budget="AIMDBudget"),
    Row("history_tree", "fifo", "off"),
    Row("history_tree", "packed", "draft"),
    Row("history_tree", "packed", "keep"),
    Row.of_one_width("history_tree", "packed", "keep"),
]


def run_row(
    row: Row, arguments: Any, *, update_s: float, steps: int, cpu: float = 1.0, policies: Path | None = None
) -> Course:
    """Run a row on the virtual clock (a second of other CPU time is `cpu` s); policies after epochs go to a folder."""
    workers = row.num_workers(arguments)
    # Of the time that the trainer's devices alone would take.
    share = arguments.trainers / workers if row.is_colocated else 1.0
    course = Course(
        share * update_s, arguments.weights / arguments.lengths, policies=policies, epoch_steps=arguments.epoch_steps
    )
    backend = [
        "backend._target_=benchmarks.emulation.virtual.VirtualWorkers",
        f"backend.emulate={device(arguments.emulate)}",
        f"backend.lengths={arguments.lengths}",
        f"backend.widths={list(row.widths)}",
        f"backend.max_running={arguments.max_running}",
        f"backend.cpu={cpu}",
        f"workers={workers}",
    ]
    with ExitStack() as stack, tempfile.TemporaryDirectory() as folder:
        settings = [*settings_of(row, arguments, steps=steps), *backend, f"run_dir={Path(folder) / 'run'}"]
        course.watch(stack, waits_for_all=row == ONE_STEP_OFF)
        course.result = fit(compose(config_in(folder), settings))
    return course


def device(emulate: str | Path) -> Path:
    """Return the file with the costs of a device: one of ours by its name, or any other."""
    path = Path(emulate)
    return path if path.suffix == ".json" else Path(__file__).parents[1] / "emulated" / f"{emulate}.json"


def config_in(folder: str) -> Path:
    """Write a config of its own into the folder, whose settings may be of classes that no packaged config has."""
    config = Path(folder) / "headline.yaml"
    config.write_text("defaults:\n  - quickstart\n  - _self_\n")
    return config


def settings_of(row: Row, arguments: Any, *, steps: int) -> list[str]:
    """Return what a row is, without a backend."""
    return [
        "deterministic=true",
        "task=long_sum",
        f"model.path={Path(__file__).parents[1] / 'policies' / arguments.policy}",
        "rollout.max_tokens=448",
        "update.learning_rate=1e-4",
        f"task.train_size={arguments.prompts * arguments.epoch_steps}",
        f"data.prompts_per_step={arguments.prompts}",
        *row.settings,
        f"task.validation_size={arguments.held_out}",
        f"trainer.max_steps={steps}",
        "checkpoint.every_n_steps=1000",
        "report=false",
        f"seed={arguments.seed}",
        *arguments.settings,
    ]


def figures(row: Row, course: Course, found: dict[str, Course], arguments: Any) -> dict[str, Any]:
    """Return the figures of a row, beside those that came before it."""
    count, whole, spent = row.num_workers(arguments), course.seconds, course.spent
    beside = spent["busy"] - spent["passes"] - spent["weights"] - spent["draft"]
    rejected = spent["nodes"] * (1 - course.result["spec_accept_rate"])
    update, trainer = (course.idle_s(windows, count) for windows in (course.updates, course.between))
    lost = {
        "nodes": rejected,
        "padding": spent["padding"],
        "draft": spent["draft"],
        "beside": beside,
        "weights": spent["weights"],
        "update": update,
        "trainer": trainer,
        "bubbles": count * whole - spent["busy"] - update - trainer,
    }
    needed = course.least_s(count, arguments.max_running)
    updates = sum(end - start for start, end in course.updates)
    least = needed + updates if row.run_ahead == "off" else max(needed, updates)
    return {
        "row": row.name,
        "drafter": row.drafter,
        "scheduler": row.scheduler,
        "run_ahead": row.run_ahead,
        "pipeline": "colocated" if row.is_colocated else "disaggregated",
        "over_barrier": round(found[BARRIER.name].seconds / whole, 3),
        "over_colocated": round(found[COLOCATED.name].seconds / whole, 3),
        "over_one_step_off": round(found[ONE_STEP_OFF.name].seconds / whole, 3),
        "bound": round(found[BARRIER.name].seconds / least, 3),
        "to_held_out": to_held_out(course, found[BARRIER.name]),
        "to_reward": to_reward(course, found[BARRIER.name], window=arguments.epoch_steps),
        "step_s": record.spread(
            [after - before for before, after in zip([0.0, *course.ends], course.ends, strict=False)]
        ),
        "lost": {part: round(seconds / (count * whole), 3) for part, seconds in lost.items()},
        "update_frac": round(updates / whole, 3),
        "update_s": round(updates / len(course.updates), 3),
        "trainer_frac": round(sum(end - start for start, end in course.between) / whole, 4),
        "tokens_a_pass": round(course.mean("rollout/spec_accept_length"), 3),
        "staleness": round(course.mean("off_policy/staleness/mean"), 3),
        "reward": [round(float(each), 3) for each in course.rewards(arguments.epoch_steps)[[0, -1]]],
        "epochs_s": [round(each, 2) for each in course.epochs_s],
        "held_out": [round(each, 4) for each in course.held_out],
        "held_out_error": round(max((each * (1 - each) / arguments.judged) ** 0.5 for each in course.held_out), 4),
        "length": round(course.mean("completions/mean_length"), 1),
        "length_correlation": course.length_correlation,
    }


def to_reward(course: Course, barrier: Course, *, window: int) -> float | None:
    """Return how many times sooner than the barrier a row has the barrier's reward of its last epoch but one.

    The reward is the mean of `window` steps in a row. None where it never has.
    """
    target = barrier.rewards(window)[-1 - window]
    times = [
        float(each.ends[int(np.argmax(rewards >= target)) + window - 1])
        for each in (barrier, course)
        if ((rewards := each.rewards(window)) >= target).any()
    ]
    return round(times[0] / times[1], 3) if len(times) == 2 else None


def to_held_out(course: Course, barrier: Course) -> float | None:
    """Return how many times sooner than the barrier a row has nine tenths of its held-out gain; None if never.

    A line that never falls lies midway between the best of the epochs so far and the worst of those to come.
    """
    rising = [
        (np.maximum.accumulate(each.held_out) + np.minimum.accumulate(each.held_out[::-1])[::-1]) / 2
        for each in (barrier, course)
    ]
    target = rising[0][0] + _GAIN * (rising[0][-1] - rising[0][0])
    if rising[1][-1] < target or rising[0][0] == target:
        return None
    times = []
    for each, rewards in zip((barrier, course), rising, strict=True):
        ends = [0.0, *each.epochs_s]
        after = int(np.argmax(rewards >= target))
        share = (target - rewards[after - 1]) / (rewards[after] - rewards[after - 1])
        times.append(ends[after - 1] + share * (ends[after] - ends[after - 1]))
    return round(float(times[0] / times[1]), 3)


def held_out(course: Course, arguments: Any) -> list[float]:
    """Return the held-out rewards before the first step and after each epoch of a run whose policies were kept."""
    assert course.policies is not None
    start = Path(__file__).parents[1] / "policies" / arguments.policy
    kept = sorted(course.policies.iterdir(), key=lambda path: int(path.name))
    rewards = []
    for policy in (start, *kept):
        with tempfile.TemporaryDirectory() as folder, redirect_stdout(StringIO()):
            sizes = [f"model.path={policy}", f"task.validation_size={arguments.judged}", f"run_dir={folder}/run"]
            config = compose(config_in(folder), [*settings_of(BARRIER, arguments, steps=1), *sizes])
            rewards.append(evaluate(config)["eval/reward"])
    return rewards


def update_seconds(arguments: Any) -> float:
    """Return the seconds of an update per token, with which it is `update` of a step of the first row."""
    for row in QUICK[-2:]:  # what is compiled or cached once is nobody's time
        run_row(row, arguments, update_s=0.0, steps=2)
    before = run_row(BARRIER, arguments, update_s=0.0, steps=arguments.epoch_steps)
    return float(arguments.update / (1 - arguments.update) * sum(before.rollouts) / sum(map(sum, before.lengths)))


def measured(chosen: Sequence[Row], arguments: Any, *, steps: int) -> list[dict[str, Any]]:
    """Run the rows, of which the first three are the baselines; return their figures."""
    update_s = update_seconds(arguments)
    found: dict[str, Course] = {}
    rows: list[dict[str, Any]] = []
    for row in chosen:
        with tempfile.TemporaryDirectory() as folder:
            course = run_row(row, arguments, update_s=update_s, steps=steps, policies=Path(folder))
            same = next((each for each in found.values() if each.answers == course.answers), None)
            course.held_out = same.held_out if same is not None else held_out(course, arguments)
        found[row.name] = course
        for each in chosen[len(rows) : len(found)] if ONE_STEP_OFF.name in found else []:
            rows.append(figures(each, found[each.name], found, arguments))
            record.note_row(rows[-1])
    return rows


def options(description: str | None) -> argparse.ArgumentParser:
    """Return the options of all that runs rows."""
    return record.options(
        description,
        emulate="h100_8b",
        lengths=32.0,
        policy="long_sum",
        workers=4,
        trainers=2,
        max_running=32,
        prompts=16,
        epoch_steps=4,
        steps=24,
        update=0.12,
        weights=0.6,
        held_out=128,
        judged=512,
        settings=True,
    )


def check_steps(parser: argparse.ArgumentParser, arguments: Any, steps: int) -> None:
    """Refuse fewer steps than the figures of a row need."""
    if steps < 2 * arguments.epoch_steps:
        parser.error(f"--steps: {steps} are less than two epochs of {arguments.epoch_steps}")


def main(words: Sequence[str] | None = None) -> dict[str, Any]:
    parser = options(__doc__)
    parser.add_argument("--quick", action="store_true", help=f"the main rows, and {QUICK_STEPS} steps")
    parser.add_argument("--rows", nargs="*", help="names of rows, beside the three that all are compared with")
    arguments = record.begin(parser, words, threads=1)
    chosen, steps = (QUICK, QUICK_STEPS) if arguments.quick else (ROWS, arguments.steps)
    check_steps(parser, arguments, steps)
    if arguments.rows is not None:
        if unknown := set(arguments.rows) - {row.name for row in ROWS}:
            parser.error(
                f"--rows: no row is called {min(unknown)!r}; expected some of {', '.join(repr(row.name) for row in ROWS)}"
            )
        chosen = [row for row in ROWS if row in BASELINES or row.name in arguments.rows]
    rows = measured(chosen, arguments, steps=steps)
    return record.finish("headline", __doc__, arguments, rows=rows)


if __name__ == "__main__":
    main()
