"""The exception tree. Everything that rhymerl raises on purpose is one of these, or a ValueError of a constructor.

A constructor does not know where in a config its object stands. Its ValueError names the argument ("window=-1: expected
at least 0"), and `rhymerl.config` makes a ConfigError of it that names the setting ("drafter.window=-1: expected at
least 0").

RhymeError                 something rhymerl noticed; the message is one readable line
├── UsageError             the user's input is wrong (exit code 2)
│   ├── ConfigError        a setting: names it, its value and what is allowed
│   └── DataError          a data file: names the file, the line and what is wrong
└── RunError               the run failed (exit code 1)
    ├── BackendError       a rollout engine failed or broke its promises
    ├── HookError          a drafter, budget or scheduler raised, or returned what its base class forbids
    ├── EpisodeError       an environment cannot be asked at all (a failing call costs one episode instead)
    └── RewardError        a reward function cannot be used at all (a failing call costs one sample instead)
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Iterable, Mapping
from math import inf, isfinite
from typing import Any, Literal, TypeVar, get_args, get_origin

T = TypeVar("T")
_EXTRAS = {  # of the package, by what they bring
    **{name: name for name in ("gguf", "openenv", "ray", "sglang", "verifiers", "wandb")},
    "accelerate": "gguf",
    "datasets": "data",
    "math_verify": "math",
    "matplotlib": "plot",
    "peft": "lora",
    "pyarrow": "data",
    "reasoning_gym": "reasoning",
}


class RhymeError(Exception):
    """Something rhymerl noticed."""


class UsageError(RhymeError):
    """The user's input is wrong; nothing has been computed."""


class ConfigError(UsageError):
    """A setting is wrong: the message names it, its value and what is allowed."""


class DataError(UsageError):
    """A data file is wrong: the message names the file, the place in it and what is wrong."""


class RunError(RhymeError):
    """The run failed."""


class BackendError(RunError):
    """A rollout engine failed or broke its promises."""


class HookError(RunError, ValueError):
    """A drafter, budget or scheduler raised, or broke its base class's contract: the message names class and line."""


class EpisodeError(RunError):
    """An environment cannot be asked at all."""


class RewardError(RunError):
    """A reward function cannot be used at all."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the end of a message, `; did you mean max_nodes?`, or nothing when no known name is near."""
    from difflib import get_close_matches

    near = get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""


def require_at_least(
    limits: Mapping[str, tuple[float, float]], *, error: type[ValueError | ConfigError] = ValueError
) -> None:
    """Raise `error` for the first of `limits` (name -> value, least) whose value is too small, or not finite."""
    for name, (value, least) in limits.items():
        if not least <= value < inf:
            words = f"at least {least}" if value < least else "a finite number"
            raise error(f"{name}={value}: expected {words}")


def at_least(least: float, default: T) -> T:
    """Return a field for a finite number that is not below `least`; or for None, where its type has that."""
    return dataclasses.field(default=default, metadata={"at_least": least})


def check_ranges(settings: Any) -> None:
    """Raise ValueError for the first of a dataclass's settings that is not what `at_least` says of it."""
    for field in (each for each in dataclasses.fields(settings) if each.init):
        value = getattr(settings, field.name)
        if "at_least" in field.metadata and (value is not None or "None" not in str(field.type)):
            require_at_least({field.name: (value, field.metadata["at_least"])})


def require(holds: bool, name: str, value: object, expected: str) -> None:
    """Raise ValueError that names the setting unless it holds."""
    if not holds:
        raise ValueError(f"{name}={value!r}: expected {expected}")


def require_types(settings: Any) -> None:
    """Check that a dataclass's settings are among those that their types list, and finite.

    A config has been checked already.
    """
    for field in (each for each in dataclasses.fields(settings) if each.init):
        value = getattr(settings, field.name)
        if get_origin(field.type) is Literal:
            allowed = get_args(field.type)
            require(value in allowed, field.name, value, f"one of {', '.join(allowed)}")
        elif isinstance(value, float):
            require(isfinite(value), field.name, value, "a finite number")


def require_package(name: str, where: str) -> None:
    """Raise ConfigError, which begins with `where`, for a package that is not installed; nothing is imported."""
    if importlib.util.find_spec(name) is None:
        raise missing_package(name, where)


def missing_package(name: str, where: str) -> ConfigError:
    """Return the error for a package that is not installed: `backend=ray needs ray: pip install ...`."""
    return ConfigError(f"{where} needs {name.replace('_', '-')}: pip install 'rhymerl[{_EXTRAS[name]}]'")
