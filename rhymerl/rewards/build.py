"""From what users write to a list of rewards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from rhymerl.errors import ConfigError
from rhymerl.rewards.base import Reward, RewardFn
from rhymerl.rewards.resolve import nearest

RewardSpec = str | RewardFn | Reward | Mapping[str, Any]

_FORMS = "a dotted name, a function, a Reward or a mapping of its fields"
_FIELDS = tuple(each.name for each in fields(Reward) if each.init)


def build_rewards(
    spec: RewardSpec | Mapping[str, RewardSpec | None] | Sequence[RewardSpec] | None,
) -> list[Reward]:
    """Rewards from one function or dotted name, a mapping by name, or a sequence; None gives none.

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
    if isinstance(value, Reward):
        return value if name is None else replace(value, name=name)
    if isinstance(value, Mapping):
        return _build_from_fields(name, value)
    if isinstance(value, str) or callable(value):
        return Reward(value, name=name)
    raise ConfigError(f"rewards{f'.{name}' if name else ''}={value!r}: expected {_FORMS}")


def _build_from_fields(name: str | None, values: Mapping[str, Any]) -> Reward:
    path = f"rewards.{name}" if name else "rewards"
    for key in values:
        if key not in _FIELDS:
            raise ConfigError(f"{path}.{key}: unknown field{nearest(key, _FIELDS)}; known: {', '.join(_FIELDS)}")
    if "function" not in values:
        raise ConfigError(f"{path}.function is missing: expected a dotted name or a function")
    return Reward(**{"name": name, **values})
