"""Build a list of rewards from what users write, and what a checkpoint can hold of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from numbers import Real
from typing import Any

from rhymerl.config import construct, plain
from rhymerl.errors import ConfigError, did_you_mean
from rhymerl.rewards.base import Reward, RewardFn, own_name
from rhymerl.rewards.resolve import find_home

RewardSpec = str | RewardFn | Reward | Mapping[str, Any]

_FORMS = "a dotted name, a function, a Reward or a mapping of its fields"
_FIELDS = tuple(each.name for each in fields(Reward) if each.init)


def build_rewards(
    spec: RewardSpec | Mapping[str, RewardSpec | None] | Sequence[RewardSpec] | None,
) -> list[Reward]:
    """Return rewards from one function or dotted name, a mapping by name, or a sequence; None gives none.

    `{"correct": "my_module.score", "short": {"function": "my_module.short", "weight": 0.1}, "style": None}`:
    None switches an inherited one off. Raises ConfigError, also when two have one name.
    """
    if spec is None:
        return []
    if isinstance(spec, Mapping):
        rewards = [_build(str(name), value) for name, value in spec.items() if value is not None]
    elif isinstance(spec, str | Reward) or callable(spec):
        rewards = [_build(None, spec)]
    elif isinstance(spec, Sequence):
        rewards = [_build(None, value) for value in spec]
    else:
        raise ConfigError(f"rewards={spec!r}: expected {_FORMS}")
    names = [reward.name for reward in rewards]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"rewards.{name}: {names.count(name)} rewards have this name, expected distinct names")
    return rewards


def _build(name: str | None, value: object) -> Reward:
    """Return the reward that stands at `name`; one in a list stands at a name of its own."""
    path = f"rewards.{name}" if name else "rewards"
    if isinstance(value, Reward):
        if name is None:
            return value
        values: Mapping[str, Any] = _fields_of(value) | {"name": name}
    elif isinstance(value, Mapping):
        values = {"name": name, **value}
    elif isinstance(value, str) or callable(value):
        values = {"name": name, "function": value}
    else:
        raise ConfigError(f"{path}={value!r}: expected {_FORMS}")
    for key in values:
        if key not in _FIELDS:
            raise ConfigError(f"{path}.{key}: unknown field{did_you_mean(key, _FIELDS)}; known: {', '.join(_FIELDS)}")
    if "function" not in values:
        raise ConfigError(f"{path}.function is missing: expected a dotted name or a function")
    place = name if name is not None else values["name"] or own_name(values["function"])
    return construct(Reward, values, key=f"rewards.{place}")


def _fields_of(reward: Reward) -> dict[str, Any]:
    return {field: getattr(reward, field) for field in _FIELDS} | ({"where": None} if reward.is_only_here else {})


def plain_rewards(spec: Any) -> Any:
    """Return plain containers of which `build_rewards` makes the same rewards, with dotted names for functions.

    Raises TypeError when there is something in it that has none.
    """
    if isinstance(spec, Mapping):
        return {str(name): _plain_reward(value, name=str(name)) for name, value in spec.items()}
    if isinstance(spec, Reward):
        return [_plain_reward(spec)]
    if isinstance(spec, Sequence) and not isinstance(spec, str):
        return [_plain_reward(value) for value in spec]
    return _plain_reward(spec)


def _plain_reward(value: object, *, name: str | None = None) -> Any:
    if isinstance(value, Reward):
        return _plain_reward({**_fields_of(value), "name": name or value.name})
    if isinstance(value, Mapping):
        return {str(key): (_dotted_name if key == "function" else _plain_data)(item) for key, item in value.items()}
    return _dotted_name(value)


def _dotted_name(function: object) -> str | None:
    if function is None or isinstance(function, str):
        return function
    home = find_home(function)
    if home is None:
        words = getattr(function, "__qualname__", f"a {type(function).__name__}")
        raise TypeError(f"{words} cannot be imported by name")
    return f"{home.module}.{home.qualname}"


def _plain_data(value: object) -> Any:
    """Return plain data, which excludes functions by their names: a reward's argument would then be another one."""
    if isinstance(value, Mapping):
        return {key: _plain_data(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [_plain_data(item) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if value is None or isinstance(value, str | Real):
        return plain(value)
    raise TypeError(f"a {type(value).__name__} is among its settings")
