"""What can be told of a training run before libraries are loaded that take seconds: its paths, columns and extras."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rhymerl.config.targets import look_in_current_directory
from rhymerl.config.tree import ABSENT, find, is_component, walk
from rhymerl.data.base import PROMPT_COLUMN, LocatedRow, prompt_in
from rhymerl.data.sources import is_data_set, read_rows
from rhymerl.errors import ConfigError, require_package
from rhymerl.models.places import check_place
from rhymerl.rewards import Reward, build_rewards, check_columns

_ROWS = 1000  # of a data set that are looked at here; the run looks at all of them
_PACKAGES = {  # that a class needs, by how its path begins
    "rhymerl.backends.sglang.": ("backend=sglang", "sglang"),
    "rhymerl.workers.remote.ray.": ("backend=ray", "ray"),
    "rhymerl.models.lora.": ("adapter", "peft"),
    "rhymerl.tasks.reasoning_gym.": ("task=reasoning_gym", "reasoning_gym"),
    "rhymerl.environments.adapters.Verifiers": ("environment=verifiers", "verifiers"),
    "lightning.pytorch.loggers.WandbLogger": ("logger=lightning.pytorch.loggers.WandbLogger", "wandb"),
}


def check_early(config: dict[str, Any]) -> None:
    """Raise ConfigError or DataError for what is wrong in any case with a config as it is `written`.

    All else is left to the run, which makes every check again: defaults, links, and parts of the user's own.
    """
    for key in ("model.path", "data.train"):
        if find(config, key) == "???":
            raise ConfigError(f"{key}: required, but not set")
    _check_packages(config)
    path = find(config, "model.path")
    if find(config, "model._target_") == "rhymerl.models.policy.PolicySource" and _is_plain(path):
        check_place(path, f"model.path={path!r}")
    if find(config, "data._target_") == "rhymerl.data.PromptDataModule":
        _check_data(config)


def _check_packages(config: dict[str, Any]) -> None:
    for node in (each for _, each in walk(config) if is_component(each)):
        for start, (where, package) in _PACKAGES.items():
            if str(node["_target_"]).startswith(start) and not node.get("url"):  # at which a server runs already
                require_package(package, where)


def _check_data(config: dict[str, Any]) -> None:
    column = find(config, "data.prompt_column")
    look_in_current_directory()
    rewards = _rewards_of(config)
    for setting, source in _sources(config):
        if is_data_set(source):
            require_package("datasets", f"{setting}={source!r}: reading it")
        else:
            rows = read_rows(source, setting, only_first=_num_rows(config, setting))
            _check_rows(rows, PROMPT_COLUMN if column is ABSENT else column, rewards)


def _rewards_of(config: dict[str, Any]) -> list[Reward]:
    """Return the rewards as they are written; none where settings or classes make them, or rows will be left out."""
    spec = find(config, "rewards")
    is_made_later = spec is ABSENT or any(mark in repr(spec) for mark in ("${", "_target_"))
    leaves_rows_out = find(config, "data.filter_overlong_prompts") is True
    return [] if is_made_later or leaves_rows_out else build_rewards(spec)


def _num_rows(config: dict[str, Any], setting: str) -> int:
    validated = find(config, "data.validation_prompts")
    is_limited = setting.startswith("data.validation") and isinstance(validated, int)
    return min(_ROWS, validated) if is_limited else _ROWS


def _check_rows(rows: list[LocatedRow], column: str, rewards: list[Reward]) -> None:
    for located in rows:
        prompt_in(located, column)
    names = {name for located in rows for name in located.row} - {column, "id"}
    gaps = {name: each.location for name in names for each in reversed(rows) if name not in each.row}
    for reward in rewards:
        check_columns(reward, sorted(names - gaps.keys()), gaps=gaps)


def _sources(config: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the files and names of data sets, each with its setting."""
    for key in ("data.train", "data.validation"):
        found = find(config, key)
        named = {f"{key}.{name}": each for name, each in found.items()} if isinstance(found, Mapping) else {key: found}
        for setting, source in named.items():
            several = {f"{setting}[{n}]": each for n, each in enumerate(source)} if isinstance(source, list) else None
            yield from ((name, each) for name, each in (several or {setting: source}).items() if _is_plain(each))


def _is_plain(value: object) -> bool:
    return isinstance(value, str) and "${" not in value
