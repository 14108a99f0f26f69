"""A speed guard: echo step, quickstart step and rollouts of this tree over an earlier commit's, interleaved.

Both trees run through the command line with settings that do not change (docs/configuration.md), in the same
environment. Their training runs take turns step by step (turns.py), their rollouts one after the other in alternating
order, so that drift of the machine hits them alike. A ratio is this tree's time over that of the base; below 1 is
faster. That of a training run is the median of its steps' ratios; the table has the median of all rounds. `verdict` is
red where it is above --limit: then the exit code is 1. A workload that the base cannot run yet is `not in the base`.
Run it on a machine that does nothing else. A commit compared with itself shows what the machine lets one see.

    make bench-guard BASE=COMMIT
    python -m benchmarks.regression.guard --base COMMIT [--repeats 5] [--only echo quickstart rollout]
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import record
from benchmarks.regression import echo_task

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "TOKENIZERS_PARALLELISM": "false"}
STEPS = {"echo": 60, "quickstart": 20}
WARM_UP = {"echo": 10, "quickstart": 2}  # steps
ROWS = (1, 8, 64)  # requests that decode side by side
ECHO = """\
defaults:
  - grpo_jsonl
  - _self_
model:
  path: policy
data:
  train: echo.jsonl
  prompts_per_step: 8
rewards:
  exact_match: null
  echo: echo_task.echo
rollout:
  group_size: 8
  max_tokens: 32
update:
  learning_rate: 1e-3
checkpoint:
  every_n_steps: 1000
"""

Times = Mapping[str, Sequence[float]]  # seconds by what was measured; of a training run those of each step


class NotInBaseError(Exception):
    """The base has no such command or setting yet."""


@dataclass(frozen=True)
class Tree:
    """A checkout, and where it may write."""

    name: str
    root: Path
    folder: Path

    def start(self, *words: str, turns: socket.socket | None = None, is_first: bool = False) -> Running:
        """Start `rhymerl WORDS` of this checkout in its folder; with `turns` it trains when it is its turn."""
        environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join([str(self.root), str(self.folder)])}
        if turns is not None:
            environment |= {"TURNS_SOCKET": str(turns.fileno()), "TURNS_FIRST": str(int(is_first))}
        return Running(
            self,
            words,
            subprocess.Popen(
                [sys.executable, "-m", "rhymerl", *words],
                cwd=self.folder,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                pass_fds=() if turns is None else (turns.fileno(),),
            ),
        )


@dataclass(frozen=True)
class Running:
    """A command of a checkout that is under way."""

    tree: Tree
    words: Sequence[str]
    process: subprocess.Popen[str]

    def result(self) -> str:
        """Return what it prints. Raises NotInBaseError when the base cannot do it."""
        printed, complaints = self.process.communicate()
        if self.process.returncode == 0:
            return printed
        if self.tree.name == "base":
            raise NotInBaseError(complaints.strip()[-300:])
        raise SystemExit(f"rhymerl {' '.join(self.words)} failed:\n{complaints[-4000:]}")


# -- what is measured ------------------------------------------------------------------------------------------------


def fit(trees: Sequence[Tree], workload: str, *words: str) -> dict[str, Times]:
    """Seconds of each training step, its rollout and its update, of runs that take turns; the first tree begins."""
    trained(dict.fromkeys(trees, (*words, f"trainer.max_steps={STEPS[workload]}")))
    return {tree.name: _times_of(tree, workload) for tree in trees}


def trained(words: Mapping[Tree, Sequence[str]]) -> None:
    """Run `rhymerl fit` with two trees' words into their folders' `run`, a step each in turn, the first one first.

    Seconds of the steps go to the folders' `steps.json`.
    """
    ends = socket.socketpair()
    with ends[0], ends[1]:
        runs = []
        for end, (tree, own) in zip(ends, words.items(), strict=True):
            shutil.rmtree(tree.folder / "run", ignore_errors=True)
            callback = "trainer.callbacks=[{_target_: turns.Turns, file: steps.json}]"
            own = ("fit", *own, f"run_dir={tree.folder / 'run'}", callback)
            runs.append(tree.start(*own, turns=end, is_first=not runs))
    with ThreadPoolExecutor(len(runs)) as threads:  # both are read and waited for, whatever becomes of one
        results = [threads.submit(run.result) for run in runs]
    for each in results:
        each.result()


def _times_of(tree: Tree, workload: str) -> Times:
    skipped, events = WARM_UP[workload], events_of(tree.folder / "run")
    found = {"step": json.loads((tree.folder / "steps.json").read_text())}
    for name in ("rollout", "update"):
        found[name] = [each.value for each in events[f"timing_s/{name}"]]
    return {f"{workload} {name}": values[skipped:] for name, values in found.items()}


def events_of(run_dir: Path) -> dict[str, Any]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = next(run_dir.rglob("events.out.tfevents.*")).parent
    accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    return {tag: accumulator.Scalars(tag) for tag in accumulator.Tags()["scalars"]}


def rollout(tree: Tree, rows: int) -> Times:
    """Seconds of the first pass over some prompts, which has no history, and of the third."""
    running = tree.start(
        "rollout",
        "model.path=policy",
        f"data.prompts=prompts-{rows}.jsonl",
        "rollout.max_tokens=128",
        "passes=3",
        f"backend.max_running={rows}",
        "deterministic=false",
        "out=rollouts.jsonl",
        "overwrite=true",
        "--json",
    )
    passes = json.loads(running.result().splitlines()[-1])["by_pass"]
    return {f"rollout {rows} rows, pass {number}": [passes[number - 1]["rollout_s"]] for number in (1, 3)}


WORKLOADS = {
    "echo": lambda trees: fit(trees, "echo", "--config", "echo.yaml"),
    "quickstart": lambda trees: fit(trees, "quickstart", "--config", "quickstart", "task.validation_size=16"),
    **{f"rollout {rows}": lambda trees, rows=rows: {tree.name: rollout(tree, rows) for tree in trees} for rows in ROWS},
}


# -- both trees --------------------------------------------------------------------------------------------------------


@contextmanager
def checkout(commit: str) -> Iterator[Path]:
    """The commit's files in a folder of their own, while it lasts."""
    with tempfile.TemporaryDirectory(prefix="rhymerl-base-") as folder:
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--detach", "--quiet", folder, commit], check=True)
        try:
            yield Path(folder)
        finally:
            subprocess.run([*git, "remove", "--force", folder], check=True)


def prepare(folder: Path, *, seed: int) -> None:
    """Policy, prompts and config that both trees use."""
    from rhymerl.models.policy import PolicySource

    folder.mkdir()
    PolicySource(init=echo_task.MODEL, characters=echo_task.CHARACTERS, seed=seed).load().save(folder / "policy")
    (folder / "echo.yaml").write_text(ECHO)
    for name in ("echo_task.py", "turns.py"):
        shutil.copy(HERE / name, folder)
    (folder / "echo.jsonl").write_text("".join(json.dumps(row) + "\n" for row in echo_task.rows()))
    for rows in ROWS:
        prompts = [{"prompt": row["prompt"], "id": str(n)} for n, row in enumerate(echo_task.rows() * 8)][
            : 2 * rows + 2
        ]
        (folder / f"prompts-{rows}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))


def measure(trees: Sequence[Tree], wanted: Sequence[str], repeats: int) -> list[dict[str, Any]]:
    """A row of the table for each time that was measured."""
    found: dict[str, list[tuple[Sequence[float], Sequence[float]]]] = {}
    missing: set[str] = set()
    for number in range(repeats):
        for name in wanted:
            if name in missing:
                continue
            try:
                times = WORKLOADS[name](trees[:: -1 if number % 2 else 1])
            except NotInBaseError as error:
                print(f"{name}: {error}", file=sys.stderr)
                missing.add(name)
                continue
            for what, seconds in times["new"].items():
                pair = times["base"][what], seconds
                found.setdefault(what, []).append(pair)
                print(f"round {number + 1}  {what}: {ratio(*pair):.3f}", file=sys.stderr, flush=True)
    rows = [_row(what, pairs) for what, pairs in found.items()]
    return [*rows, *({"what": name, "verdict": "not in the base"} for name in wanted if name in missing)]


def ratio(base: Sequence[float], new: Sequence[float]) -> float:
    return statistics.median(each / before for before, each in zip(base, new, strict=True))


def _row(what: str, pairs: Sequence[tuple[Sequence[float], Sequence[float]]]) -> dict[str, Any]:
    base, new = zip(*pairs, strict=True)
    return {
        "what": what,
        "base_ms": record.spread(1000 * statistics.median(each) for each in base),
        "new_ms": record.spread(1000 * statistics.median(each) for each in new),
        "ratio": record.spread(ratio(*pair) for pair in pairs),
    }


def main(words: Sequence[str] | None = None) -> dict[str, Any]:
    parser = record.options(__doc__, repeats=5, limit=1.05)
    parser.add_argument("--base", required=True, help="commit to compare with")
    parser.add_argument("--only", nargs="+", choices=("echo", "quickstart", "rollout"), default=None)
    arguments = record.begin(parser, words)
    wanted = [name for name in WORKLOADS if arguments.only is None or name.split()[0] in arguments.only]
    with tempfile.TemporaryDirectory(prefix="rhymerl-guard-") as folder, checkout(arguments.base) as base:
        trees = [Tree("base", base, Path(folder, "base")), Tree("new", ROOT, Path(folder, "new"))]
        for tree in trees:
            prepare(tree.folder, seed=arguments.seed)
        rows = measure(trees, wanted, arguments.repeats)
    for row in rows:
        if "ratio" in row:
            row["verdict"] = "red" if row["ratio"]["median"] > arguments.limit else "ok"
    return record.finish("guard", __doc__, arguments, rows=rows)


if __name__ == "__main__":
    sys.exit(any(row["verdict"] == "red" for row in main()["rows"]))
