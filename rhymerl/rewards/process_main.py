"""The program of a reward process: it imports the reward functions, then scores samples until its parent leaves.

Started by `rhymerl.rewards.pool` only. It imports this package and the users' modules, nothing heavy.
"""

from __future__ import annotations

from collections.abc import Coroutine, Mapping, Sequence
from contextlib import ExitStack
from functools import cache
from pkgutil import resolve_name
from typing import Any, NamedTuple

from rhymerl.rewards.base import Reward
from rhymerl.rewards.calls import Attempt, Call, Caller
from rhymerl.rewards.child import Parent
from rhymerl.rewards.hooks import opened
from rhymerl.rewards.lines import START, Outcome, line_of


class Chunk(NamedTuple):
    """Work for one process: calls of one reward, by its position in the list of rewards."""

    reward: int
    calls: Sequence[Call]


def serve(parent: Parent) -> None:
    """Score chunks of calls; the first message has the rewards' settings, with names for functions."""
    settings: list[Mapping[str, Any]] = parent.receive()
    callers = []
    with ExitStack() as stack:
        for each in settings:
            with Attempt() as attempt:
                name = each["function"]
                reward = Reward(**{**each, "function": name if isinstance(name, str) else resolve_name(":".join(name))})
                arguments = opened(reward.call, reward.arguments, stack)
                callers.append(Caller(reward=reward, arguments=arguments, drive=_drive))
            if attempt.error is not None:
                words = f"rewards.{each['name']}: a reward process cannot import it: {attempt.message}"
                parent.send(line_of(Outcome(START, "error", message=words)))
                return
        parent.send(line_of(Outcome(START, "ok")))
        chunk: Chunk
        for chunk in parent.messages():
            callers[chunk.reward].run(chunk.calls, lambda outcome: parent.send(line_of(outcome)))


def _drive(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return _runner().run(coroutine)


@cache
def _runner() -> Any:
    """Return the one loop of the process's life: users' clients outlive a chunk."""
    import asyncio  # slow to import: only processes with async rewards pay for it

    return asyncio.Runner()
