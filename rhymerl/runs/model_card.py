"""The README.md of an exported policy: its training data and settings, its results, and its reward by step."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path, PurePath
from typing import Any

from omegaconf import OmegaConf

from rhymerl.config.tree import leaves
from rhymerl.errors import ConfigError, DataError, UsageError
from rhymerl.report.base import Curve, Run
from rhymerl.report.charts.learning import reward_chart
from rhymerl.report.pictures import draw_chart
from rhymerl.report.printing import readable
from rhymerl.report.reading import read_run
from rhymerl.version import __version__

_MOST_ROWS = 12
_CURVES = ("reward", "completions/mean_length", "kl", "entropy")
# What is shown of the settings. Classes of the user's own are named only: their arguments may be addresses or keys.
_SECTIONS = (
    *("seed", "deterministic", "algo", "critic", "teacher", "adapter", "update", "rollout", "evaluation", "task"),
    *("history", "drafter", "budget", "scheduler", "run_ahead", "max_staleness", "workers"),
)
_OWN = "rhymerl."
_PICTURE = "reward.png"
_HUB_NAME = re.compile(r"[A-Za-z0-9_.-]+/[A-Za-z0-9_.-]+")


def write_model_card(folder: Path, checkpoint: Mapping[str, Any], run: Path | None) -> None:
    """Write the `README.md` of an exported policy, and its reward as a picture if matplotlib is installed.

    `run` is the directory of the run, for its results and curves; None where only the checkpoint is there.
    """
    found = _read(run)
    config = checkpoint["callbacks"].get("_RunConfig", {}).get("config", {})
    step = int(checkpoint["rhymerl"]["num_rollouts"])
    picture = _draw(found, folder) if found is not None else None
    parts = [
        _head(config, step),
        _data(config),
        _results(found, step) if found is not None else "",
        f"![Reward by step]({picture})" if picture else "",
        _settings(config),
    ]
    (folder / "README.md").write_text("\n\n".join(part for part in parts if part) + "\n", encoding="utf-8")


def _read(run: Path | None) -> Run | None:
    """Return the run, or None if its files cannot be read any more: it is then exported without curves."""
    try:
        return read_run(run) if run is not None else None
    except (UsageError, ConfigError, DataError):
        return None


def _head(config: Mapping[str, Any], step: int) -> str:
    base = (config.get("model") or {}).get("path")
    name = _code(base) if base else "a model that was built from scratch"
    algorithm = _class_of(config, "algo") or "reinforcement learning"
    lines = ["---", "library_name: transformers", "tags: [rhymerl, reinforcement-learning]"]
    if isinstance(base, str) and _HUB_NAME.fullmatch(base) and not Path(base).exists():
        lines.append(f"base_model: {base}")
    words = f"{name} after {step} rollout steps of {algorithm}, trained with rhymerl {__version__}."
    return "\n".join([*lines, "---", "", "# Model card", "", words])


def _data(config: Mapping[str, Any]) -> str:
    data, task = config.get("data") or {}, config.get("task")
    lines = ["## Data", ""]
    if task:
        words = ", ".join(
            _code(f"{name}={_public(value)}") for name, value in _shown(task).items() if name != "_target_"
        )
        lines.append(f"- task: {_class_of(config, 'task')}{f' ({words})' if words else ''}")
    names = [name for name in ("train", "validation", "system_prompt") if data.get(name) is not None]
    lines += [f"- {name}: {_code(data[name])}" for name in names]
    lines.append(f"- rewards: {_rewards(config.get('rewards'))}")
    return "\n".join(lines)


def _results(run: Run, step: int) -> str:
    figures = {name: value for name, value in run.summary.items() if isinstance(value, int | float)}
    rows = [f"| {_code(name.replace('|', '¦'))} | {readable(value)} |" for name, value in figures.items()]
    summary = ["## Results", "", "| of the whole run | |", "|---|---|", *rows, ""] if rows else ["## Results", ""]
    curves = {name: run.curves[name] for name in _CURVES if name in run.curves}
    return "\n".join([*summary, *(_table(curves, step) if curves else [])])


def _table(curves: Mapping[str, Curve], step: int) -> list[str]:
    """Return a table of some steps up to the exported one, the first and the last among them."""
    first = next(iter(curves.values()))
    steps = [each for each in first if each <= step]
    chosen = (
        sorted({steps[round(index * (len(steps) - 1) / _MOST_ROWS)] for index in range(_MOST_ROWS + 1)})
        if steps
        else []
    )
    rows = [
        [str(each), *(readable(found[each]) if each in found else "" for found in curves.values())] for each in chosen
    ]
    head = ["step", *curves]
    return [f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *rows)]


def _draw(run: Run, folder: Path) -> str | None:
    if find_spec("matplotlib") is None or "reward" not in run.curves:  # without the extra plot, the table says it
        return None
    draw_chart(reward_chart([run]), folder / _PICTURE)
    return _PICTURE


def _settings(config: Mapping[str, Any]) -> str:
    shown = {name: _shown(config[name]) for name in _SECTIONS if name in config}
    if not shown:
        return ""
    text = OmegaConf.to_yaml(OmegaConf.create(_public(shown))).rstrip()
    count = sum(1 for _ in leaves(shown))
    fence = _ticks(text, least=3)
    return f"## Settings\n\n<details><summary>{count} settings</summary>\n\n{fence}yaml\n{text}\n{fence}\n\n</details>"


def _shown(value: Any) -> Any:
    """Return a setting without the arguments of classes that are not rhymerl's."""
    if not isinstance(value, Mapping):
        return value
    if not str(value.get("_target_", _OWN)).startswith(_OWN):
        return {"_target_": value["_target_"]}
    return {name: _shown(item) for name, item in value.items()}


def _rewards(given: Any) -> str:
    if not isinstance(given, Mapping):
        return "those of the task"
    functions = {name: each.get("function") if isinstance(each, Mapping) else each for name, each in given.items()}
    return ", ".join(
        f"{_code(name)} ({_code(function)})" for name, function in functions.items() if function is not None
    )


def _code(value: Any) -> str:
    """Return a value's public part as inline code without Markdown or HTML, for all values beside the settings."""
    printable = "".join(each if each.isprintable() else " " for each in str(_public(value)))
    text = " ".join(printable.split()) or " "
    ticks = _ticks(text, least=1)
    return f"{ticks} {text} {ticks}" if "`" in text else f"{ticks}{text}{ticks}"


def _ticks(text: str, *, least: int) -> str:
    """Return more backticks than stand side by side in a text."""
    return "`" * max([least, *(len(run) + 1 for run in re.findall("`+", text))])


def _public(value: Any) -> Any:
    """Return a value without the places of this machine: of an absolute path its last name."""
    if isinstance(value, Mapping):
        return {name: _public(item) for name, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_public(item) for item in value]
    is_path = isinstance(value, str) and value.startswith(("/", "~")) and "\n" not in value
    return PurePath(value).name if is_path else value


def _class_of(config: Mapping[str, Any], section: str) -> str | None:
    node = config.get(section)
    return _code(str(node["_target_"]).rpartition(".")[2]) if isinstance(node, Mapping) and "_target_" in node else None
