"""Environments behind an OpenEnv server (the package `openenv`): each episode is a session of the server."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from rhymerl.environments.base import Environment, Reply, Turn
from rhymerl.errors import require_package
from rhymerl.tasks.base import Row, Task, TaskSplit

_OF_STEP = ("done", "reward", "metadata")  # fields that every observation may have beside its own


async def _connected(url: str) -> Any:
    """Raises ConfigError without the package, and ValueError where no server answers."""
    require_package("openenv", "environment=openenv")
    from openenv.core import GenericEnvClient

    client = GenericEnvClient(base_url=url)
    try:
        await client.connect()
    except OSError as error:
        raise ValueError(f"url={url!r}: no OpenEnv server answers: {error}") from error
    return client


def _shown(observation: Mapping[str, Any], field: str | None) -> str:
    """Raises KeyError for a field that the observation lacks."""
    if field is not None:
        value = observation[field]
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    fields = {name: value for name, value in observation.items() if name not in _OF_STEP}
    return json.dumps(fields, ensure_ascii=False)


@dataclass(kw_only=True, eq=False)
class OpenEnv(Environment):
    """Lets the policy act in an environment of an OpenEnv server at `url`, such as http://localhost:8000.

    A turn's text becomes the field `action` of an action; None: it is the action itself, as a JSON object. The reply is
    the field `observation` of what the step observes; None: all of it, as JSON. Rewards are the server's, of each turn.

    An episode begins with a `reset`, which gets the row's columns in `reset`. What that observes is not shown: it
    belongs into the prompt, where `OpenEnvTask` puts it.
    """

    url: str
    action: str | None = None
    observation: str | None = None
    reset: Sequence[str] = ("seed",)

    def prepare(self, tokenizer: Any) -> Self:
        """Raises ValueError where no server answers."""

        async def try_server() -> None:
            await (await _connected(self.url)).close()

        asyncio.run(try_server())
        return self

    async def open(self, row: Mapping[str, Any]) -> Environment:
        client = await _connected(self.url)
        await client.reset(**{name: row[name] for name in self.reset if name in row})
        return _ServerSession(self, client)

    def reply(self, row: Mapping[str, Any], turns: Sequence[Turn]) -> Reply:
        raise AssertionError("its sessions are asked")

    def action_of(self, text: str) -> Mapping[str, Any]:
        """Raises ValueError, in words for the policy, for what is no action."""
        if self.action is not None:
            return {self.action: text}
        try:
            action = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"the action is no JSON: {error}") from error
        if not isinstance(action, dict):
            raise ValueError("the action is no JSON object")
        return action


class _ServerSession(Environment):
    def __init__(self, environment: OpenEnv, client: Any) -> None:
        self._environment = environment
        self._client = client

    async def reply(self, row: Mapping[str, Any], turns: Sequence[Turn]) -> Reply:
        try:
            action = self._environment.action_of(turns[-1].text)
        except ValueError as error:
            return Reply(content=f"error: {error}", metrics={"malformed_actions": 1.0})
        result = await self._client.step(action)
        content = None if result.done else _shown(result.observation, self._environment.observation)
        return Reply(content=content, reward=result.reward, done=result.done, metrics={"malformed_actions": 0.0})

    async def close(self) -> None:
        await self._client.close()


@dataclass(kw_only=True, eq=False)
class OpenEnvTask(Task):
    """The starts of an OpenEnv server's episodes: `instructions`, then what a `reset` with a seed observes.

    `observation` is the field that is shown, as of `OpenEnv`. With `chat` it is a message of the user, and the
    instructions one of the system. Validation has other seeds than training.
    """

    url: str
    observation: str | None = None
    instructions: str = ""
    chat: bool = True

    def problem(self, random_source: random.Random) -> Row:
        return self._problems([random_source.getrandbits(30)])[0]

    def rows(self, split: TaskSplit) -> list[Row]:
        size = self.train_size if split == "train" else self.validation_size
        seeds = random.Random(self.seed).sample(range(2**30), size)
        return self._problems([2 * seed + (split == "train") for seed in seeds])

    def _problems(self, seeds: Sequence[int]) -> list[Row]:
        async def observe() -> list[Row]:
            client = await _connected(self.url)
            try:
                return [self._problem(seed, (await client.reset(seed=seed)).observation) for seed in seeds]
            finally:
                await client.close()

        return asyncio.run(observe())

    def _problem(self, seed: int, observation: Mapping[str, Any]) -> Row:
        text = _shown(observation, self.observation)
        if not self.chat:
            return {"prompt": self.instructions + text, "seed": seed}
        system = [{"role": "system", "content": self.instructions}] if self.instructions else []
        return {"prompt": [*system, {"role": "user", "content": text}], "seed": seed}
