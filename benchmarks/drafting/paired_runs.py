"""Training runs with a config's drafts and with drafter=none: the speed-up of drafts, and what the run reported.

The two runs of a pair take turns, a step each, and begin with the same seed, so that they sample the same tokens up to
rounding. `had` is the ratio of the seconds of their rollouts, all steps of the run counted; `said` is the run's own
`rollout_speedup`, with its interval (`low`, `high`), and `off` is said over had, less 1; they are empty where the run
was too short to tell. `equal_steps` are the steps from the first on in which both had the same rewards and as many
tokens: rounding of float32 turns one of some hundred thousand, and from then on the runs are two. The row "all" has the
means of the pairs. `step` is the ratio of the seconds of whole steps.

    python -m benchmarks.drafting.paired_runs --config smollm2 [--repeats 3] [key=value ...]
"""

from __future__ import annotations

import json
import shutil
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import record
from benchmarks.regression import guard

COLUMNS = ("plain_s", "own_s", "plain_step_s", "step_s", "said", "low", "high")
MUST_BE_EQUAL = ("reward", "num_tokens")  # metrics


def pair(folder: Path, settings: Sequence[str], *, seed: int, drafts_first: bool) -> dict[str, Any]:
    """A row of the table: a run with drafts and one without, in turn."""
    trees = [guard.Tree(name, guard.ROOT, folder / name) for name in ("drafts", "plain")]
    for tree in trees:
        tree.folder.mkdir()
        shutil.copy(guard.HERE / "turns.py", tree.folder)
    common = (*settings, f"seed={seed}", "trainer.limit_val_batches=0", "report=false")
    words = {trees[0]: common, trees[1]: (*common, "drafter=none")}
    guard.trained({tree: words[tree] for tree in trees[:: 1 if drafts_first else -1]})
    own, plain = (guard.events_of(tree.folder / "run") for tree in trees)
    summary = json.loads((trees[0].folder / "run" / "summary.json").read_text())
    seconds = [sum(json.loads((tree.folder / "steps.json").read_text())) for tree in trees]
    return {
        "pair": seed,
        "plain_s": sum(each.value for each in plain["timing_s/rollout"]),
        "own_s": sum(each.value for each in own["timing_s/rollout"]),
        "plain_step_s": seconds[1],
        "step_s": seconds[0],
        "said": summary["rollout_speedup"],
        "low": summary["rollout_speedup_low"],
        "high": summary["rollout_speedup_high"],
        "equal_steps": min(equal_steps(own[name], plain[name]) for name in MUST_BE_EQUAL),
    }


def equal_steps(own: Sequence[Any], plain: Sequence[Any]) -> int:
    """The number of events with equal values before the first that differ."""
    pairs = zip(own, plain, strict=True)
    return next((number for number, (a, b) in enumerate(pairs) if a.value != b.value), len(own))


def averaged(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The row of all pairs: means of what is known."""
    known = {name: [row[name] for row in rows if row[name] is not None] for name in COLUMNS}
    means = {name: statistics.mean(values) if values else None for name, values in known.items()}
    return {"pair": "all", **means, "equal_steps": min(row["equal_steps"] for row in rows)}


def finished(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row with its ratios, rounded."""
    had = row["plain_s"] / row["own_s"]
    off = None if row["said"] is None else row["said"] / had - 1
    ratios = {"had": had, "off": off, "step": row["plain_step_s"] / row["step_s"]}
    return {name: round(value, 3) if isinstance(value, float) else value for name, value in {**row, **ratios}.items()}


def main(words: Sequence[str] | None = None) -> dict[str, Any]:
    arguments = record.begin(record.options(__doc__, repeats=3, config="quickstart", settings=True), words)
    found: list[dict[str, Any]] = []
    for number in range(arguments.repeats):
        with tempfile.TemporaryDirectory(prefix="rhymerl-pair-") as folder:
            settings = ("--config", arguments.config, *arguments.settings)
            row = pair(Path(folder), settings, seed=arguments.seed + number, drafts_first=number % 2 == 0)
        found.append(row)
        record.note_row(finished(row))
    rows = [finished(row) for row in (*found, averaged(found))]
    return record.finish("paired_runs", __doc__, arguments, rows=rows)


if __name__ == "__main__":
    main()
