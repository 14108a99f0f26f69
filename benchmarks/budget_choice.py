"""What a run says of its drafts against what they bring: its rollouts are answered again, without drafts and with fixed budgets.

A run is trained as its config says. Before each step other engines answer the same requests with the same weights: one without drafts, and one
for each fixed number of nodes, whose drafters follow the run's history. So each epoch has, for the whole of its rollouts, the speed-up that
the run `had` over the engine without drafts, the one that it `said` (rollout/speedup), the one that its budget `expected`
(budget/expected_speedup), and that of the best fixed number. The order of the engines turns from step to step; the run's own comes last.

    python benchmarks/budget_choice.py --config quickstart [--nodes 1 2 4 8] [key=value ...]
"""

from __future__ import annotations

import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import record
from beside import Beside, started

from rhymerl.backends.embedded import EmbeddedBackend
from rhymerl.budgets import FixedBudget
from rhymerl.config import compose
from rhymerl.drafters import HistoryTreeDrafter, NoDrafter
from rhymerl.runs.fit import fit
from rhymerl.training.module import RhymeModule

SAID = {"said": "rollout/speedup", "expected": "budget/expected_speedup"}


def engine_of(module: RhymeModule, nodes: int, stack: ExitStack) -> EmbeddedBackend:
    """Return an engine that drafts so many nodes, otherwise like the run's own."""
    own = module.backend
    assert isinstance(own, EmbeddedBackend)
    drafter = HistoryTreeDrafter(deterministic=True) if nodes else NoDrafter()
    sizes = {"max_running": own.max_running, "kv_tokens": own.kv_tokens}
    return started(stack, module, drafter, FixedBudget(nodes), **sizes)


def main(words: Sequence[str] | None = None) -> dict[str, Any]:
    parser = record.options(__doc__)
    parser.add_argument("--config", default="quickstart")
    parser.add_argument("--nodes", nargs="*", type=int, default=[1, 2, 4, 8])
    parser.add_argument("settings", nargs="*", metavar="key=value")
    arguments = parser.parse_args(words)
    record.set_threads(arguments.threads)
    start = record.environment()
    steps: list[dict[str, float]] = []
    seconds: dict[int, list[float]] = defaultdict(list)  # a step, by nodes
    train_step, log_end = RhymeModule.training_step, RhymeModule.on_train_batch_end
    with ExitStack() as stack, tempfile.TemporaryDirectory() as folder:
        others = Beside((0, *arguments.nodes), partial(engine_of, stack=stack))

        def training_step(self: RhymeModule, batch: Any, batch_idx: int) -> Any:
            for number, taken in others.answer(self, batch.prompts).items():
                seconds[number].append(taken.seconds)
            loader = self.trainer.datamodule.train_loader  # type: ignore[attr-defined]
            steps.append({"epoch": loader.epoch})
            return train_step(self, batch, batch_idx)

        def on_train_batch_end(self: RhymeModule, *rest: Any) -> None:
            assert self.last_rollout is not None
            metrics = self.last_rollout.metrics
            busy = 1 - float(metrics["rollout/bubble_frac"])  # without the scoring, which the others have none of
            steps[-1]["own"] = busy * float(metrics["timing_s/rollout"])
            for name, metric in SAID.items():
                if metric in metrics:  # what is said is of all rollouts since it was said last
                    for step in steps:
                        step.setdefault(name, float(metrics[metric]))
            log_end(self, *rest)

        stack.enter_context(
            patch.multiple(RhymeModule, training_step=training_step, on_train_batch_end=on_train_batch_end)
        )
        settings = ["trainer.limit_val_batches=0", f"run_dir={Path(folder) / 'run'}", *arguments.settings]
        fit(compose(arguments.config, settings))
    rows = [
        row_of(
            epoch, [number for number, step in enumerate(steps) if epoch in ("all", int(step["epoch"]))], steps, seconds
        )
        for epoch in [*dict.fromkeys(int(step["epoch"]) for step in steps), "all"]
    ]
    for row in rows:
        print(record.cell(row), file=sys.stderr, flush=True)
    return record.finish("budget_choice", __doc__, arguments, rows=rows, start=start)


def row_of(
    epoch: Any, of: Sequence[int], steps: Sequence[dict[str, float]], times: Mapping[int, Sequence[float]]
) -> dict[str, Any]:
    """A row of the table, of the steps `of`; speed-ups are ratios of summed seconds."""
    own = sum(steps[each]["own"] for each in of)
    seconds = {number: sum(taken[each] for each in of) for number, taken in times.items()}
    best = min(seconds, key=lambda number: seconds[number])
    said = {name: [(steps[each]["own"], steps[each][name]) for each in of if name in steps[each]] for name in SAID}
    means = {
        name: sum(s * value for s, value in pairs) / max(sum(s for s, _ in pairs), 1e-9) for name, pairs in said.items()
    }
    return {
        "epoch": epoch,
        "plain_s": float(f"{seconds[0]:.4g}"),
        "own_s": float(f"{own:.4g}"),
        "had": round(seconds[0] / own, 3),
        **{name: round(mean, 3) for name, mean in means.items()},
        "best_fixed": best,
        "best_had": round(seconds[0] / seconds[best], 3),
        **{f"fixed_{number}": round(seconds[0] / taken, 3) for number, taken in seconds.items() if number},
    }


if __name__ == "__main__":
    main()
