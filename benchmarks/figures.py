"""The age of every figure that the pages quote, and the command that takes it again.

A row a file in benchmarks/results/: the commits of its figures, and how many later commits changed what they judge.
Figures of a quiet machine are taken again by hand, one command at a time.

    python -m benchmarks.figures
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from benchmarks import record

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
_COMMIT = re.compile(r'"?commit"?:? "?([0-9a-f]{12}(?:-dirty)?|unknown)')

_DRAFTS = ("rhymerl/drafters", "rhymerl/history")
_ROLLOUT = (*_DRAFTS, "rhymerl/budgets", "rhymerl/engine", "rhymerl/models", "rhymerl/backends/embedded.py")
_STEP = (*_ROLLOUT, "rhymerl/algos", "rhymerl/data", "rhymerl/rewards", "rhymerl/rollout", "rhymerl/training")
_SCHEDULES = ("rhymerl/schedulers", "rhymerl/simulation", "rhymerl/workers")
_CARD = (*_ROLLOUT, "rhymerl/backends/sglang", "benchmarks/gpu")
_SUMS = "out/warmstart_smollm2_sums"
_TRL = "benchmarks.against_trl.compare --trl-python PYTHON"


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The command that takes a result file again, a module with its options or a whole one, and the code it judges."""

    command: str
    judges: tuple[str, ...]


SOURCES = {  # by the name of the file, but for its date and suffix
    "draft_overhead_xeon-2core": Source(command="benchmarks.drafting.draft_overhead --seconds 5", judges=_ROLLOUT),
    "draft_rules_epyc-2core": Source(
        command="benchmarks.drafting.draft_rules benchmarks/traces/running_sum.jsonl.gz "
        "benchmarks/traces/smollm2_*.jsonl.gz --arctic FOLDER",
        judges=_DRAFTS,
    ),
    "emulation_check_epyc-2core": Source(command="benchmarks.emulation.emulation_check", judges=_STEP + _SCHEDULES),
    "engine_profile_h200": Source(command="make gpu", judges=_ROLLOUT),
    "first_runs_epyc-2core": Source(command="benchmarks.learning.first_runs --configs quickstart", judges=_STEP),
    "gpu_h200": Source(command="make gpu", judges=_CARD),
    "guard_epyc-2core": Source(
        command="benchmarks.regression.guard --base ed7ece3 --repeats 1 --only quickstart", judges=_STEP
    ),
    "guard_xeon-2core": Source(command="benchmarks.regression.guard --base ed7ece3 --repeats 3", judges=_STEP),
    "headline_settings_epyc-2core": Source(
        command="benchmarks.emulation.headline_settings --only '8B on an H100, seed 0' '8B on an H100, seed 1' "
        "'8B on an H100, seed 2' '8B on an H100, update 30 %' 'lengths by chance' '64 slots, 32 prompts a step'",
        judges=_STEP + _SCHEDULES,
    ),
    "headline_settings_epyc-2core-h200-7b": Source(
        command="benchmarks.emulation.headline_settings --only '7B on an H200, measured passes'",
        judges=_STEP + _SCHEDULES,
    ),
    "headline_xeon-2core": Source(
        command="benchmarks.emulation.headline --plot benchmarks/results/headline_xeon-2core_202611.png",
        judges=_STEP + _SCHEDULES,
    ),
    "layer_kinds_epyc-2core": Source(command="benchmarks.drafting.layer_kinds", judges=_ROLLOUT),
    "longer_task_epyc-2core-smollm2": Source(
        command="benchmarks.drafting.longer_task model.path=policies/smollm2_sums trainer.precision=bf16-mixed",
        judges=_ROLLOUT,
    ),
    "overlap_epyc-2core": Source(
        command="benchmarks.emulation.overlap --scale 15 --steps 16 --plot overlap_epyc-2core_202611.png",
        judges=("rhymerl/workers", "rhymerl/training"),
    ),
    "paired_runs_epyc-2core": Source(command="benchmarks.drafting.paired_runs", judges=_STEP),
    "paired_runs_epyc-2core-smollm2": Source(command="benchmarks.drafting.paired_runs --config smollm2", judges=_STEP),
    "paired_runs_epyc-2core-smollm2-sums": Source(
        command=f"benchmarks.drafting.paired_runs --config smollm2_sums model.path={_SUMS} data.prompts_per_step=3 "
        "task.train_size=12 trainer.max_steps=16",
        judges=_STEP,
    ),
    "rollout_speed_xeon-2core": Source(command="rhymerl bench rollout --json", judges=_ROLLOUT),
    "schedule_xeon-2core": Source(
        command="rhymerl simulate scheduler=[sorted,packed,histopipe,paced] run_ahead=keep --json", judges=_SCHEDULES
    ),
    "sglang_passes_h200": Source(command="make gpu", judges=("rhymerl/backends/sglang", *_DRAFTS)),
    "sharded_memory_epyc-2core": Source(
        command="benchmarks.update.sharded_memory", judges=("rhymerl/memory", "rhymerl/training")
    ),
    "shared_prefixes_epyc-2core": Source(
        command="benchmarks.update.shared_prefixes --repeats 1 --cases addition 'long prompts' 'short prompts' "
        "'additions, first epoch' 'additions, last epoch' 'long sums, first epoch' 'long sums, last epoch'",
        judges=("rhymerl/models", "rhymerl/training"),
    ),
    "shared_prefixes_epyc-2core-long-answers": Source(
        command="benchmarks.update.shared_prefixes --repeats 1 --cases 'long answers'",
        judges=("rhymerl/models", "rhymerl/training"),
    ),
    "tournament_epyc-2core": Source(
        command="benchmarks.scheduling.tournament", judges=("rhymerl/schedulers", "rhymerl/simulation")
    ),
    "trl_echo_epyc-2core": Source(command=f"{_TRL} --steps 40", judges=_STEP),
    "trl_echo_epyc-2core-128-tokens": Source(command=f"{_TRL} --steps 40 --max-tokens 128", judges=_STEP),
    "trl_echo_epyc-2core-480-tokens": Source(command=f"{_TRL} --steps 40 --max-tokens 480", judges=_STEP),
    "trl_running_sum_epyc-2core": Source(command=f"{_TRL} --task running_sum", judges=_STEP),
    "trl_pretrained_epyc-2core-sums": Source(
        command=f"{_TRL} --task sums --model {_SUMS} --seeds 1 --steps 6 --warm-up 1 --max-tokens 256 "
        "--rows-per-backward 6",
        judges=_STEP,
    ),
    "trl_pretrained_epyc-2core-sums-epochs": Source(
        command=f"{_TRL} --task sums --model {_SUMS} --train-size 12 --seeds 1 --steps 8 --max-tokens 256 "
        "--rows-per-backward 6",
        judges=_STEP,
    ),
    "trl_pretrained_epyc-2core-sums-epochs-seed-1": Source(
        command=f"{_TRL} --task sums --model {_SUMS} --train-size 12 --seed 1 --seeds 1 --steps 8 --max-tokens 256 "
        "--rows-per-backward 6",
        judges=_STEP,
    ),
}


def name_of(path: Path) -> str:
    """Return the key of a result file in SOURCES: its name without date and suffix."""
    return re.sub(r"_\d{6}$", "", path.stem)


def commits_of(path: Path) -> list[str]:
    """Return the commits that a result file names, in order; "-dirty" ends one with changes that are in none."""
    return list(dict.fromkeys(_COMMIT.findall(path.read_text())))


def command_of(name: str) -> str:
    """Return the whole command that takes a result file again."""
    command = SOURCES[name].command
    if not command.startswith("benchmarks."):
        return command
    hardware = next(part for part in name.split("_") if "core" in part)
    return f"python -m {command} --hardware {hardware} --out benchmarks/results"


def git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def changes_since(commit: str, judges: tuple[str, ...]) -> int:
    """Return how many later commits changed what a figure of this commit judges."""
    return int(git("rev-list", "--count", f"{commit.removesuffix('-dirty')}..HEAD", "--", *judges))


def main() -> None:
    rows = []
    for path in sorted(RESULTS.iterdir()):
        if path.suffix not in (".json", ".jsonl", ".txt"):  # the others are made of these
            continue
        name, commits = name_of(path), commits_of(path)
        ages = [changes_since(commit, SOURCES[name].judges) for commit in commits]
        row = {"file": path.name, "commit": commits, "later changes": ages, "again": f"`{command_of(name)}`"}
        rows.append(row)
    print(record.table(rows))


if __name__ == "__main__":
    main()
