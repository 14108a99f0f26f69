"""The parts that all benchmarks share: their common options, spreads, and the record of where a figure came from."""

from __future__ import annotations

import argparse
import ctypes
import importlib.metadata
import itertools
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

ROOT = Path(__file__).parents[1]
ROWS = "RHYMERL_BENCHMARK_ROWS"
KNOWN = "RHYMERL_BENCHMARK_KNOWN"
COMMIT = "RHYMERL_COMMIT"
PR_SET_PDEATHSIG = 1  # of prctl(2)
PACKAGES = ("torch", "transformers", "lightning", "numpy", "numba")

Row = Mapping[str, Any]
Value = TypeVar("Value")


def options(description: str | None, *, settings: bool = False, **own: Any) -> argparse.ArgumentParser:
    """A parser with the options that every benchmark has, its `own` by their defaults, and the settings of a run.

    An option is of its default's type, and a list has some of them; a type in the place of a default has none.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"seed": 0, **own}.items():
        parser.add_argument(f"--{name.replace('_', '-')}", **_of_default(default))
    parser.add_argument("--threads", type=int, help="torch threads (default: torch's own choice)")
    parser.add_argument("--out", type=Path, help="folder for the result files; take them on a quiet machine only")
    parser.add_argument("--hardware", default=default_hardware(), help="name of the machine in the file's name")
    if settings:
        parser.add_argument("settings", nargs="*", metavar="key=value", help="further settings of the run")
    return parser


def _of_default(default: Any) -> dict[str, Any]:
    if isinstance(default, type):
        return {"type": default}
    if default is False:
        return {"action": "store_true"}
    shown = {"default": default, "help": f"({cell(default)})" if default != [] else None}
    if isinstance(default, list):
        return {"nargs": "+" if default else "*", "type": type(default[0]) if default else str, **shown}
    return {"type": type(default), **shown}


def begin(parser: argparse.ArgumentParser, words: Sequence[str] | None, *, threads: int | None = None) -> Any:
    """Return what the words say, with the `start` of the benchmark; `threads` where they say nothing of them."""
    arguments = parser.parse_args(words)
    set_threads(arguments.threads or threads)
    arguments.start = environment()
    return arguments


def default_hardware() -> str:
    """Such as "2cpu": the cores that this process may use."""
    return f"{len(os.sched_getaffinity(0))}cpu"


def set_threads(threads: int | None) -> None:
    import torch

    if threads is not None:
        torch.set_num_threads(threads)


def spread(values: Iterable[float]) -> dict[str, float]:
    """Median and range, to four digits."""
    found = list(values)
    parts = {"median": statistics.median(found), "min": min(found), "max": max(found)}
    return {name: float(f"{value:.4g}") for name, value in parts.items()}


def interleaved(
    measures: Mapping[str, Callable[[], Value]], *, repeats: int, warm_up: int = 1
) -> dict[str, list[Value]]:
    """Call all measures in turn, `repeats` times, so that drift of the machine hits them alike; -> values by name.

    The first `warm_up` rounds are not kept.
    """
    values: dict[str, list[Value]] = {name: [] for name in measures}
    for number in range(warm_up + repeats):
        for name, measure in measures.items():
            value = measure()
            if number >= warm_up:
                values[name].append(value)
    return values


def seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def environment() -> dict[str, Any]:
    """Hardware, versions and commit; `load` is the machine's, averaged over the last minute."""
    import torch

    return {
        "date": time.strftime("%Y-%m-%d"),
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        **versions(PACKAGES),
        "commit": commit(),
    }


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Return the installed versions by name; "-" for a package that is not there."""
    found = {}
    for name in packages:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "-"
    return found


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def commit() -> str:
    """Return the variable's commit, else the current one, "-dirty" if package or benchmarks differ from it."""
    if given := os.environ.get(COMMIT):
        return given
    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", "rhymerl", "benchmarks")
        return git("rev-parse", "--short=12", "HEAD") + ("-dirty" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """The options that shape the figures; interpreters and folders of one machine are left out."""
    left_out = ("out", "hardware", "trl_python", "start")
    return {name: value for name, value in vars(arguments).items() if name not in left_out}


def note_row(row: Row) -> None:
    """Append a row to the file in RHYMERL_BENCHMARK_ROWS, in case the rest is not reached; else show it."""
    if name := os.environ.get(ROWS):
        with Path(name).open("a") as file:
            file.write(json.dumps(row) + "\n")
    else:
        print(cell(row), file=sys.stderr, flush=True)


def cases(**values: Iterable[Any]) -> list[Row]:
    """Return a case for each combination, in which the last name's value changes first."""
    return [dict(zip(values, each, strict=True)) for each in itertools.product(*values.values())]


def rows_of(cases: Iterable[Row], measure: Callable[..., Row]) -> list[Row]:
    """Return a row a case, with the case's own values first: `measure(**case)`, or the row that was taken before.

    Each new row is noted. The rows of before are in the file that the variable RHYMERL_BENCHMARK_KNOWN names.
    """
    known = os.environ.get(KNOWN)
    before = [json.loads(line) for line in Path(known).read_text().splitlines()] if known else []
    rows: list[Row] = []
    for case in cases:
        row = next((each for each in before if case.items() <= each.items()), None)
        if row is None:
            row = {**case, **measure(**case)}
            note_row(row)
        rows.append(row)
    return rows


@contextmanager
def fitted(*words: str, timeout_s: float | None = None) -> Iterator[Path]:
    """Train by `rhymerl fit` with these words in a process that dies with this one; its folder lasts as long as this.

    Raises subprocess.TimeoutExpired, and SystemExit where it fails.
    """
    with tempfile.TemporaryDirectory(prefix="rhymerl-fit-") as folder:
        run = Path(folder, "run")
        command = [sys.executable, "-m", "rhymerl", "fit", f"run_dir={run}", *words]
        done = subprocess.run(command, timeout=timeout_s, stdout=2, preexec_fn=dying_with(os.getpid()))  # as stderr
        if done.returncode:
            raise SystemExit(f"rhymerl fit ended with {done.returncode}")
        yield run


def dying_with(parent: int) -> Callable[[], None]:
    """Return a `preexec_fn` that ends a process with its parent, even a killed one, so that no run has company."""

    def prepare() -> None:
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it has gone before
            os._exit(1)

    return prepare


def finish(
    theme: str,
    description: str | None,
    arguments: argparse.Namespace,
    *,
    rows: Sequence[Row],
    **more: Any,
) -> dict[str, Any]:
    """Print the table and last one JSON object; write both below `--out`."""
    result = {
        "benchmark": theme,
        "config": settings(arguments),
        "environment": {**arguments.start, "load_at_end": round(os.getloadavg()[0], 2)},
        "rows": list(rows),
        **more,
    }
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)
        name = f"{theme}_{arguments.hardware}_{time.strftime('%Y%m')}"
        (arguments.out / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
        (arguments.out / f"{name}.md").write_text(page(result, description or theme))
    print(table(rows))
    print(json.dumps(result), flush=True)
    return result


def page(result: Mapping[str, Any], description: str) -> str:
    """The result as Markdown: what was measured, the table, the rest."""
    known = ("benchmark", "config", "environment", "rows")
    more = [f"- {name}: {cell(value)}" for name, value in result.items() if name not in known]
    parts = [
        f"# {result['benchmark']}",
        description.strip().partition("\n\n")[0],
        table(result["rows"]),
        *(["\n".join(more)] if more else []),
        "Ranges are over the repeats. Config: " + cell(result["config"]),
        "Environment: " + cell(result["environment"]),
    ]
    return "\n\n".join(parts) + "\n"


def table(rows: Sequence[Row]) -> str:
    """A Markdown table; a spread reads "median (min-max)"."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = [names, ["---"] * len(names), *([cell(row.get(name, "")) for name in names] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def cell(value: Any) -> str:
    if isinstance(value, Mapping):
        if list(value) == ["median", "min", "max"]:
            return f"{value['median']:g} ({value['min']:g}-{value['max']:g})"
        return ", ".join(f"{name} {cell(each)}" for name, each in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(cell, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
