"""The part of a module's arguments that a checkpoint holds, and the message when it could not hold one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rhymerl.config import describe, plain
from rhymerl.errors import ConfigError
from rhymerl.models.policy import PolicySource
from rhymerl.rewards import plain_rewards

_LOST = "_lost_"
_PARTS = ("algo", "teacher", "rollout", "update", "evaluation", "drafter", "budget", "history", "scheduler", "backend")
_PLAIN = ("run_ahead", "max_staleness", "reward_workers", "environment_workers", "seed")


def arguments_of(module: Any, source: object) -> dict[str, Any]:
    """Return a RhymeModule's arguments in plain containers, with a mark for each that a checkpoint cannot hold.

    `source` is where its model came from.
    """
    return {
        "model": held(source, _describe_source),
        **{name: held(getattr(module, name), describe) for name in _PARTS},
        "critic": held(module.critic_settings, describe),
        "rewards": held(module.rewards, plain_rewards),
        "environment": held(module.environment, describe) if module.environment is not None else None,
        **{name: plain(getattr(module, name)) for name in _PLAIN},
    }


def _describe_source(source: object) -> dict[str, Any]:
    if not isinstance(source, PolicySource):
        raise TypeError(f"a {type(source).__name__} that was loaded already, not where to load one from")
    return describe(source)


def held(value: Any, express: Callable[[Any], Any]) -> Any:
    """Return `express(value)`, plain containers; if it raises TypeError, a mark with the reason."""
    try:
        return express(value)
    except TypeError as error:
        return {_LOST: str(error)}


def refuse_lost(**arguments: object) -> None:
    """Raise ConfigError for an argument that is the mark of one which the checkpoint could not hold."""
    for name, value in arguments.items():
        if isinstance(value, Mapping) and _LOST in value:
            raise ConfigError(
                f"{name}: given as an object that a checkpoint cannot hold ({value[_LOST]}); "
                f"pass {name}= to load_from_checkpoint again"
            )
