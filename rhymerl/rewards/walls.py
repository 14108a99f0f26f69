"""The needs of a reward that uses the sandbox: settings and the machine."""

from __future__ import annotations

import sys
from collections.abc import Collection
from typing import TYPE_CHECKING

from rhymerl.errors import ConfigError
from rhymerl.rewards.arguments import check_argument, is_integer, is_number

if TYPE_CHECKING:
    from rhymerl.rewards.base import Reward

_START_S = 2.0  # of the pool's time limit, for a sandbox to come up on a busy machine
_OPEN_WITHOUT = {
    "namespaces": "an answer could read this machine's files, your data set's among them",
    "seccomp": "an answer could start processes, and reach more of the kernel",
    "process_limit": "an answer could start threads without number",
}


def check_sandbox(reward: Reward, *, time_limit_s: float, min_memory_mb: int) -> None:
    """Raise ConfigError for limits that no answer can keep.

    Also for walls that this machine lacks and that nobody has renounced. `time_limit_s` is the function's default.
    """
    from rhymerl.rewards.sandbox.run import WALLS, SandboxError, missing_walls

    _check_arguments(reward, walls=WALLS, min_memory_mb=min_memory_mb)
    if sys.platform != "linux":
        raise ConfigError(f"{reward.setting}: its sandbox needs Linux, and this is {sys.platform}")
    try:
        missing = missing_walls()
    except SandboxError as error:
        raise ConfigError(f"{reward.setting}: {error}") from error
    allowed = reward.arguments.get("unsafe_without", ())
    if lacking := [name for name in WALLS if name in {*missing} - {*allowed}]:
        offered = " and no ".join(f"{name} ({missing[name]})" for name in lacking)
        consequences = "; ".join(_OPEN_WITHOUT[name] for name in lacking)
        accepted = ", ".join(name for name in WALLS if name in {*lacking, *allowed})
        raise ConfigError(
            f"{reward.setting}: this machine offers its sandbox no {offered}, and without that {consequences}; allow it, "
            f"or accept that with rewards.{reward.name}.arguments.unsafe_without=[{accepted}]"
        )
    needed_s = reward.arguments.get("time_limit_s", time_limit_s) + _START_S
    if reward.where == "pool" and reward.timeout_s < needed_s:
        raise ConfigError(
            f"rewards.{reward.name}.timeout_s={reward.timeout_s:g}: expected at least {needed_s:g}, "
            f"arguments.time_limit_s and {_START_S:g} seconds for the sandbox to come up"
        )


def _check_arguments(reward: Reward, *, walls: Collection[str], min_memory_mb: int) -> None:
    check_argument(reward, "time_limit_s", lambda value: is_number(value) and value > 0, "a number of seconds above 0")
    enough = f"a whole number, at least {min_memory_mb}, of which Python itself needs some"
    check_argument(reward, "memory_mb", lambda value: is_integer(value) and value >= min_memory_mb, enough)
    some = f"some of {', '.join(walls)}"
    check_argument(reward, "unsafe_without", _is_collection, f"a list of walls, {some}")
    for name in reward.arguments.get("unsafe_without", ()):
        if name not in walls:
            raise ConfigError(f"rewards.{reward.name}.arguments.unsafe_without: there is no {name!r}; expected {some}")


def _is_collection(value: object) -> bool:
    return isinstance(value, Collection) and not isinstance(value, str)
