"""Two ranks on a task with a long tail: training steps with HistoPipe, run-ahead and drafts against FIFO, a barrier and none.

Answers to one prompt in four are about nine times as long as the others. Every row trains from the same policy with the same
seeds, one after another and again, `--repeats` times; the first epoch, in which nothing is known, does not count. A row is the
seconds of a step and of its rollout and update, the share of the ranks' time in rollouts in which they idled, and how many times
as fast steps are as in the first row.

    python benchmarks/ranks.py --out FOLDER
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import lightning as L
import record
import torch

from rhymerl import PromptDataModule, RhymeModule
from rhymerl.backends.embedded import EmbeddedBackend
from rhymerl.budgets import GoodputBudget
from rhymerl.drafters import HistoryTreeDrafter, NoDrafter
from rhymerl.models.policy import PolicySource
from rhymerl.rollout import RolloutSettings
from rhymerl.schedulers import FIFOScheduler, HistoPipeScheduler, PacedScheduler
from rhymerl.tasks.running_sum import RunningSum, running_sum_reward
from rhymerl.training.settings import UpdateSettings

ROWS: Mapping[str, tuple[type, str, type]] = {
    "fifo, off, none": (FIFOScheduler, "off", NoDrafter),
    "histopipe, off, none": (HistoPipeScheduler, "off", NoDrafter),
    "histopipe, draft, none": (HistoPipeScheduler, "draft", NoDrafter),
    "histopipe, keep, none": (HistoPipeScheduler, "keep", NoDrafter),
    "paced, keep, none": (PacedScheduler, "keep", NoDrafter),
    "fifo, off, history": (FIFOScheduler, "off", HistoryTreeDrafter),
    "histopipe, draft, history": (HistoPipeScheduler, "draft", HistoryTreeDrafter),
    "histopipe, keep, history": (HistoPipeScheduler, "keep", HistoryTreeDrafter),
}
TIMES = ("timing_s/step", "timing_s/rollout", "timing_s/update")
SHOWN = ("rollout/spec_accept_length", "spec/run_ahead_accept_rate", "off_policy/staleness/mean", "reward")


class LongTail(RunningSum):
    """One problem in four has seven additions of two-digit numbers, the others one of digits."""

    def problem(self, random_source: random.Random) -> dict[str, Any]:
        is_long = random_source.random() < 0.25
        count, largest = (8, 99) if is_long else (2, 9)
        numbers = [random_source.randint(largest // 9, largest) for _ in range(count)]
        return {"prompt": "+".join(map(str, numbers)) + "=?\n", "answer": str(sum(numbers))}


class Steps(L.Callback):
    """The metrics of every step."""

    def __init__(self) -> None:
        self.metrics: list[dict[str, float]] = []
        self.lengths: list[int] = []

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *rest: Any) -> None:
        self.metrics.append({name: float(value) for name, value in trainer.callback_metrics.items()})
        self.lengths += [len(sample) for sample in pl_module.last_rollout.samples]


def main(words: Sequence[str] | None = None) -> dict[str, Any]:
    parser = record.options(__doc__, repeats=3)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--prompts-per-step", type=int, default=4)
    parser.add_argument("--group-size", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--max-running", type=int, default=64)
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=ROWS, metavar="ROW")
    arguments = parser.parse_args(words)
    record.set_threads(arguments.threads or 1)
    start = record.environment()
    found: dict[str, list[Steps]] = {name: [] for name in arguments.rows}
    for _ in range(arguments.repeats):
        for name in arguments.rows:
            found[name].append(train(name, arguments))
    if int(os.environ.get("LOCAL_RANK", 0)):  # Lightning has started this script again for each other rank
        return {}
    lengths = statistics.quantiles(found[arguments.rows[0]][0].lengths, n=10)
    tail = {"length_p10": lengths[0], "length_p90": lengths[-1]}
    return record.finish("ranks", __doc__, arguments, rows=table(found, arguments), start=start, **tail)


def train(name: str, arguments: argparse.Namespace) -> Steps:
    scheduler, run_ahead, drafter = ROWS[name]
    steps = Steps()
    module = RhymeModule(
        PolicySource(os.path.join(os.path.dirname(__file__), "..", "rhymerl", "assets", "quickstart_policy")),
        rollout=RolloutSettings(group_size=arguments.group_size, max_tokens=128),
        update=UpdateSettings(learning_rate=arguments.learning_rate, micro_batch_tokens=2048),
        backend=EmbeddedBackend(max_running=arguments.max_running),
        scheduler=scheduler(),
        drafter=drafter(),
        budget=GoodputBudget(),
        run_ahead=run_ahead,
        rewards=running_sum_reward,
        seed=arguments.seed,
    )
    data = PromptDataModule(
        task=LongTail(train_size=arguments.prompts, validation_size=1, seed=arguments.seed),
        prompts_per_step=arguments.prompts_per_step,
        seed=arguments.seed,
    )
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = L.Trainer(
        max_epochs=arguments.epochs,
        accelerator="cpu",
        devices=arguments.ranks,
        strategy="auto" if arguments.ranks == 1 else "ddp",
        callbacks=[steps],
        limit_val_batches=0,
        **quiet,
    )
    trainer.fit(module, data)
    torch.set_num_threads(arguments.threads or 1)
    return steps


def table(found: Mapping[str, Sequence[Steps]], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    first = -(-arguments.prompts // arguments.prompts_per_step)
    base = [step_s(steps, first) for steps in found[arguments.rows[0]]]
    rows = []
    for name, repeats in found.items():
        row: dict[str, Any] = {"row": name}
        for metric in TIMES:
            row[metric] = record.spread(mean(steps, metric, first) for steps in repeats)
        row["bubble_frac"] = record.spread(bubbles(steps, first) for steps in repeats)
        times = [step_s(steps, first) for steps in repeats]
        row["times as fast"] = record.spread(one / other for one, other in zip(base, times, strict=True))
        row |= {
            metric: round(mean(repeats[0], metric, first), 4) for metric in SHOWN if metric in repeats[0].metrics[0]
        }
        rows.append(row)
    return rows


def mean(steps: Steps, name: str, first: int) -> float:
    return statistics.fmean(metrics[name] for metrics in steps.metrics[first:])


def step_s(steps: Steps, first: int) -> float:
    return mean(steps, "timing_s/step", first)


def bubbles(steps: Steps, first: int) -> float:
    """Return the bubbles of all rollouts together."""
    rollouts = [(metrics["timing_s/rollout"], metrics["rollout/bubble_frac"]) for metrics in steps.metrics[first:]]
    return sum(seconds * share for seconds, share in rollouts) / sum(seconds for seconds, _ in rollouts)


if __name__ == "__main__":
    main()
