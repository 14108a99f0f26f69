"""The age of every figure that the pages quote, and the command that takes it again.

A row a file in benchmarks/results/: the commits of its figures, and how many later commits changed what they judge.
Figures of a quiet machine are taken again by hand, one command at a time.

    python -m benchmarks.figures
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks import record
from benchmarks.record import ROOT, git

RESULTS = ROOT / "benchmarks" / "results"
_COMMIT = re.compile(r'"?commit"?:? "?([0-9a-f]{12}(?:-dirty)?|unknown)')
_NAME = re.compile(r"(.+?)_((?:xeon|epyc)-\d+core|h\d+)")  # the theme and the machine in the name of a file

_DRAFTS = ("rhymerl/drafters", "rhymerl/history")
_ROLLOUT = (*_DRAFTS, "rhymerl/budgets", "rhymerl/engine", "rhymerl/models", "rhymerl/backends/embedded.py")
_STEP = (*_ROLLOUT, "rhymerl/algos", "rhymerl/data", "rhymerl/rewards", "rhymerl/rollout", "rhymerl/training")
_SCHEDULES = ("rhymerl/schedulers", "rhymerl/simulation", "rhymerl/workers")

JUDGES = {  # by the theme of a file: the code that its figures judge
    "draft_rules": _DRAFTS,
    "emulation_check": _STEP + _SCHEDULES,
    "engine_profile": _ROLLOUT,
    "first_runs": _STEP,
    "gpu": (*_ROLLOUT, "rhymerl/backends/sglang", "benchmarks/gpu"),
    "guard": _STEP,
    "headline": _STEP + _SCHEDULES,
    "headline_settings": _STEP + _SCHEDULES,
    "layer_kinds": _ROLLOUT,
    "longer_task": _ROLLOUT,
    "paired_runs": _STEP,
    "rollout_speed": _ROLLOUT,
    "schedule": _SCHEDULES,
    "sglang_passes": ("rhymerl/backends/sglang", *_DRAFTS),
    "shared_prefixes": ("rhymerl/models", "rhymerl/training"),
    "tournament": ("rhymerl/schedulers", "rhymerl/simulation"),
    "trl_echo": _STEP,
    "trl_pretrained": _STEP,
    "trl_running_sum": _STEP,
}
_TRL = "python -m benchmarks.against_trl.compare --trl-python PYTHON"
_COMMANDS = {  # of themes that no script of their name has
    **dict.fromkeys(("engine_profile", "gpu", "sglang_passes"), "make gpu"),
    "schedule": "rhymerl simulate scheduler=[sorted,packed,histopipe,paced] run_ahead=keep --json",
    "trl_echo": _TRL,
    "trl_pretrained": _TRL,
    "trl_running_sum": f"{_TRL} --task running_sum",
}
_GONE = ("plot",)  # options that files have, but no script any more


def theme_of(path: Path) -> str:
    """Return the theme of a result file, which begins its name."""
    return _parts(path)[0]


def _parts(path: Path) -> tuple[str, str]:
    found = _NAME.match(path.stem)
    if found is None:
        raise ValueError(f"{path.name}: expected THEME_HARDWARE")
    return found[1], found[2]


def commits_of(path: Path) -> list[str]:
    """Return the commits that a result file names, in order; "-dirty" ends one with changes that are in none."""
    return list(dict.fromkeys(_COMMIT.findall(path.read_text())))


def command_of(path: Path) -> str:
    """Return the whole command that takes a result file again, with the options that it names."""
    theme, hardware = _parts(path)
    command = _COMMANDS.get(theme)
    if command is None:
        (script,) = (ROOT / "benchmarks").glob(f"*/{theme}.py")
        command = f"python -m benchmarks.{script.parent.name}.{theme}"
    if not command.startswith("python"):
        return command
    given = json.loads(path.read_text())["config"]
    options = {**given, "hardware": hardware, "out": "benchmarks/results"}
    traces = (f"benchmarks/traces/{name}.jsonl.gz" for name in given.get("traces", []))
    return shlex.join([*shlex.split(command), *_words(options), *given.get("settings", []), *traces])


def _words(options: Mapping[str, Any]) -> Iterator[str]:
    for name, value in options.items():
        if value in (None, False, []) or name in ("settings", "traces", *_GONE):
            continue
        yield f"--{name.replace('_', '-')}"
        if name == "arctic":
            yield "FOLDER"
        elif value is not True:
            yield from map(str, value if isinstance(value, list) else [value])


def changes_since(commit: str, judges: tuple[str, ...]) -> int:
    """Return how many later commits changed what a figure of this commit judges."""
    return int(git("rev-list", "--count", f"{commit.removesuffix('-dirty')}..HEAD", "--", *judges))


def main() -> None:
    rows = []
    for path in sorted(RESULTS.iterdir()):
        if path.suffix not in (".json", ".jsonl", ".txt"):  # the others are made of these
            continue
        commits = commits_of(path)
        ages = [changes_since(commit, JUDGES[theme_of(path)]) for commit in commits]
        rows.append({"file": path.name, "commit": commits, "later changes": ages, "again": f"`{command_of(path)}`"})
    print(record.table(rows))


if __name__ == "__main__":
    main()
