"""What sampling during the update brings to training steps: Ray actors on emulated accelerators, in real time.

Four actors (`--workers`) answer with engines whose passes take the time that `--emulate` says for each, times
`--scale`, so that four of them and a trainer fit on two cores; a part of the time in which a model would compute is
waited out, and what is done beside it takes the time that it takes. The update is made to last `--update` of a step of
the first row, and as long in all rows. In that row workers idle during the update, as engines do that share their
devices with it.

A row is a mode of run_ahead: the seconds of a step after `--warm-up` steps, how many times as fast it is as `off`, the
share of the workers' time in which they idled, and the staleness of the tokens. Without bubbles the bound is 1 / (1 -
`--update`). headline.py has drafters and schedulers too.

    python -m benchmarks.emulation.overlap [--steps 20] [--plot timeline.png] [key=value ...]
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks import record
from benchmarks.emulation import timeline
from rhymerl.backends.spans import WorkerSpan
from rhymerl.config import compose
from rhymerl.runs.fit import fit
from rhymerl.training.module import RhymeModule
from rhymerl.training.updater import Updater

MODES = ("off", "draft", "keep")
OVERRUN = 0.05  # of the emulated time, above which a row is not given


@dataclass(slots=True)
class Steps:
    """The steps of a run."""

    update_s: float  # that an update takes at least
    ends: list[float] = field(default_factory=list)
    metrics: list[dict[str, float]] = field(default_factory=list)
    updates: list[tuple[float, float]] = field(default_factory=list)
    spans: list[WorkerSpan] = field(default_factory=list)
    late_s: float = 0.0

    def watch(self, stack: ExitStack) -> None:
        """Within the stack, charge updates and take figures."""
        update, end = Updater.run, RhymeModule.on_train_batch_end

        def run(updater: Updater, *given: Any, **named: Any) -> Any:
            started = time.time()
            found = update(updater, *given, **named)
            left = self.update_s - (time.time() - started)
            self.late_s += max(-left, 0.0) if self.update_s else 0.0
            time.sleep(max(left, 0.0))
            self.updates.append((started, time.time()))
            return found

        def on_train_batch_end(module: RhymeModule, *rest: Any) -> None:
            self.ends.append(time.time())
            self.metrics.append({name: float(value) for name, value in module.trainer.callback_metrics.items()})
            assert module.last_rollout is not None
            self.spans += [span for span in module.last_rollout.spans if span.activity == "decode"]
            end(module, *rest)

        stack.enter_context(patch.object(Updater, "run", run))
        stack.enter_context(patch.object(RhymeModule, "on_train_batch_end", on_train_batch_end))

    def mean(self, name: str, warm_up: int) -> float:
        """Return the mean of a metric over the steps that count."""
        return statistics.fmean(step[name] for step in self.metrics[warm_up:-1])

    def seconds(self, warm_up: int) -> list[float]:
        """Return the seconds of the steps that count: not the last one, behind which nothing is sampled ahead."""
        return [after - before for before, after in zip(self.ends[warm_up - 1 :], self.ends[warm_up:-1], strict=False)]


def run_steps(mode: str, update_s: float, arguments: Any, *, steps: int) -> Steps:
    found = Steps(update_s)
    settings = [
        f"workers={arguments.workers}",
        f"run_ahead='{mode}'",
        "backend.engine._target_=benchmarks.emulation.EmulatedBackend",
        f"backend.engine.emulate={Path(__file__).parents[1] / 'emulated' / arguments.emulate}.json",
        f"backend.engine.emulate_scale={arguments.scale}",
        "task.train_size=64",
        "data.prompts_per_step=16",
        "budget={_target_: rhymerl.budgets.GoodputBudget}",
        "trainer.limit_val_batches=0",
        f"trainer.max_steps={steps}",
        "checkpoint.every_n_steps=1000",
        *arguments.settings,
    ]
    with ExitStack() as stack, tempfile.TemporaryDirectory() as folder:
        found.watch(stack)
        fit(compose("quickstart_ray", [*settings, f"run_dir={Path(folder) / 'run'}"]))
    overrun = found.mean("emulated/overrun_frac", 1)
    if overrun > OVERRUN or found.late_s > OVERRUN * update_s * steps > 0:
        raise SystemExit(
            f"{mode}: passes took {overrun:.1%} and updates {found.late_s:.2f} s longer than they are charged; give a larger --scale"
        )
    return found


def figures(steps: Steps, off: Steps, warm_up: int) -> dict[str, Any]:
    """Return the figures of a row."""
    over_off = statistics.fmean(off.seconds(warm_up)) / statistics.fmean(steps.seconds(warm_up))
    return {
        "step_s": record.spread(steps.seconds(warm_up)),
        "over_off": round(over_off, 3),
        "idle_frac": round(steps.mean("workers/idle_frac", warm_up), 3),
        "staleness": round(steps.mean("off_policy/staleness/mean", warm_up), 3),
        "tokens_a_pass": round(steps.mean("rollout/spec_accept_length", warm_up), 3),
        "reward": round(steps.mean("reward", max(warm_up, len(steps.metrics) - 5)), 3),
        "overrun_frac": round(steps.mean("emulated/overrun_frac", 1), 4),
    }


def draw(rows: dict[str, Steps], path: Path, *, warm_up: int) -> None:
    """Draw workers and trainer over four steps of each row."""
    panels = {
        name: timeline.Panel(
            steps.spans, steps.updates, steps.ends[warm_up - 1], steps.ends[min(warm_up + 3, len(steps.ends) - 1)]
        )
        for name, steps in rows.items()
    }
    timeline.draw(panels, path, clock="")


def main(words: Sequence[str] | None = None) -> dict[str, Any]:
    parser = record.options(__doc__)
    parser.add_argument("--emulate", default="h100_8b", help="name of a file in benchmarks/emulated/")
    parser.add_argument("--scale", type=float, default=6.0)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warm-up", type=int, default=4)
    parser.add_argument("--update", type=float, default=0.3)
    parser.add_argument("--plot", help="file for a picture of workers and trainer over four steps")
    parser.add_argument("settings", nargs="*", metavar="key=value")
    arguments = parser.parse_args(words)
    record.set_threads(arguments.threads)
    start = record.environment()
    before = run_steps(MODES[0], 0.0, arguments, steps=arguments.warm_up + 4)
    update_s = arguments.update / (1 - arguments.update) * before.mean("timing_s/rollout", arguments.warm_up)
    found: dict[str, Steps] = {}
    rows = []
    for mode in MODES:
        found[mode] = run_steps(mode, update_s, arguments, steps=arguments.steps)
        taken = figures(found[mode], found[MODES[0]], arguments.warm_up)
        rows.append({"row": mode, **taken, "update_s": round(update_s, 3)})
        record.note_row(rows[-1])
    if arguments.plot is not None:
        draw(found, Path(arguments.plot), warm_up=arguments.warm_up)
    return record.finish("overlap", __doc__, arguments, rows=rows, start=start)


if __name__ == "__main__":
    main()
