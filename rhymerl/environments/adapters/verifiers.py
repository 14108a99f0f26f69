"""Environments of the package `verifiers`: its harness asks a model, and each of its calls is a turn of the policy."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, ClassVar, Self

from rhymerl.environments.adapters.endpoint import ChatEndpoint, ChatRequest, Message, appended, message_of, plain
from rhymerl.environments.base import Environment, Reply, Turn
from rhymerl.environments.calls import CallFormat
from rhymerl.environments.tools import call_format
from rhymerl.errors import ConfigError, require_package
from rhymerl.tasks.base import Row, Task, TaskSplit, split_of

_AGENT = {
    "harness": {"id": "null"},
    "runtime": {"type": "subprocess"},
}  # a chat loop with the taskset's tools, on this machine
_AT_ONCE = 16  # episodes that are begun to see their prompts


def _package() -> Any:
    require_package("verifiers", "environment=verifiers")
    import verifiers.v1

    return verifiers.v1


def _load(taskset: str, settings: Mapping[str, Any]) -> Any:
    """Return an environment of verifiers. Raises ValueError for what the package refuses."""
    vf = _package()
    given = {**settings, "taskset": {**settings.get("taskset", {}), "id": taskset}}
    try:
        names = [name for name, value in vf.resolve_env_config(given) if isinstance(value, vf.AgentConfig)]
        agents = {name: {**_AGENT, **settings.get(name, {})} for name in names}
        return vf.load_environment(vf.resolve_env_config({**given, **agents}))
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"taskset={taskset!r}: {' '.join(str(error).split())}") from error


class _Episode(Environment):
    """An episode of verifiers under way: `request` is what it asks the policy now, None when it is over."""

    def __init__(self, calls: CallFormat | None = None) -> None:
        self.request: ChatRequest | None = None
        self._calls = calls
        self._endpoint = ChatEndpoint()
        self._run: asyncio.Task[Any] | None = None

    async def start(self, environment: Any, task: Any) -> list[Message]:
        """Return the conversation with which it first asks."""
        vf = _package()
        await self._endpoint.start()
        client = vf.EvalClientConfig(base_url=self._endpoint.url, api_key_var="RHYMERL_NO_KEY")
        self._run = asyncio.create_task(environment.run_episode(task, vf.ModelContext(model="policy", client=client)))
        await self._go_on(self._run)
        if self.request is None:
            raise RuntimeError(f"the episode ended before it asked the policy: {_failure(self._run.result())}")
        return [plain(each) for each in self.request.messages]

    async def reply(self, row: Mapping[str, Any], turns: Sequence[Turn]) -> Reply:
        before = self.request
        assert before is not None and self._run is not None, "or the episode is over"
        before.answer.set_result(message_of(turns[-1].text, len(turns) - 1, self._calls))
        await self._go_on(self._run)
        if self.request is None:
            return _scored(self._run.result())
        return Reply(content=appended(before.messages, self.request.messages))

    async def _go_on(self, run: asyncio.Task[Any]) -> None:
        """Wait until it asks again, or is over."""
        asks = asyncio.create_task(self._endpoint.requests.get())
        await asyncio.wait([asks, run], return_when=asyncio.FIRST_COMPLETED)
        self.request = asks.result() if asks.done() else None
        asks.cancel()

    async def close(self) -> None:
        if self._run is not None:
            self._run.cancel()
        await self._endpoint.close()  # first, since what waits for an answer would not end
        if self._run is not None:
            await asyncio.wait([self._run])


def _failure(episode: Any) -> str:
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    return " ".join(f"{errors[-1].type}: {errors[-1].message}".split()) if errors else "it says nothing of an error"


def _scored(episode: Any) -> Reply:
    """Return the end of an episode, with its reward. Raises RuntimeError for one that has failed."""
    if not episode.ok:
        raise RuntimeError(f"the episode failed: {_failure(episode)}")
    traces = [trace for trace in episode.traces if trace.agent is None or trace.agent.trainable]
    numbers = {name: each.value for trace in traces for name, each in trace.rewards.items() if each is not None}
    numbers |= {name: value for trace in traces for name, value in trace.metrics.items() if value is not None}
    return Reply(reward=sum(trace.reward for trace in traces), done=True, metrics=numbers)


async def _first_requests(environment: Any, tasks: Iterable[Any]) -> list[ChatRequest]:
    """Return what the harness first asks about each of these tasks, whose episodes end there."""
    room = asyncio.Semaphore(_AT_ONCE)

    async def first(task: Any) -> ChatRequest:
        episode = _Episode()
        async with room:
            try:
                await episode.start(environment, task)
                assert episode.request is not None
                return episode.request
            finally:
                await episode.close()

    async with environment.serving():
        return await asyncio.gather(*map(first, tasks))


@dataclass(kw_only=True, eq=False)
class Verifiers(Environment):
    """Lets the policy play a taskset of verifiers, which has to be installed.

    `settings` are those of verifiers' own `env` section, such as `{"taskset": {…}, "agent": {"max_turns": 4}}`. By
    default the harness is `null`, verifiers' chat loop, which gets the taskset's tools, in processes on this machine.
    No harness may change what has been said. Rows come from `VerifiersTask`. The last turn gets the taskset's reward,
    and an episode that is cut off gets none. `calls` is the way in which the policy writes calls of tools, as of
    `Tools`.
    """

    taskset: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    calls: CallFormat | None = None
    _schemas: Sequence[Mapping[str, Any]] = field(init=False, repr=False, default=())
    _served: asyncio.Task[_Served] | None = field(init=False, repr=False, default=None)

    def prepare(self, tokenizer: Any) -> Self:
        """Begin an episode of the first task, to see its tools. Raises ValueError where that does not work."""
        environment = _load(self.taskset, self.settings)
        try:
            (first,) = asyncio.run(_first_requests(environment, islice(environment.taskset, 1)))
        except RuntimeError as error:
            raise ValueError(f"taskset={self.taskset!r}: {error}") from error
        calls = self.calls or (call_format(tokenizer, first.tools) if first.tools else None)
        prepared = replace(self, calls=calls)
        prepared._schemas = first.tools
        return prepared

    @property
    def tool_schemas(self) -> Sequence[Mapping[str, Any]]:
        return self._schemas

    async def open(self, row: Mapping[str, Any]) -> Environment:
        if self._served is None:
            self._served = asyncio.create_task(_Served.start(self.taskset, self.settings))
        served = await self._served
        episode = _Episode(self.calls)
        try:
            asked = await episode.start(served.environment, served.task(row["idx"]))
            if asked != row["messages"]:
                raise RuntimeError(
                    "the harness asks with another prompt than the row's, which is that of VerifiersTask"
                )
        except BaseException:
            await episode.close()
            raise
        return episode

    def reply(self, row: Mapping[str, Any], turns: Sequence[Turn]) -> Reply:
        raise AssertionError("its sessions are asked")


class _Served:
    """An environment of verifiers with what its episodes share, as long as this process lives."""

    def __init__(self, environment: Any) -> None:
        self.environment = environment
        self._serving = environment.serving()  # which would end if nobody had it
        self._unread = iter(environment.taskset)
        self._tasks: list[Any] = []

    @classmethod
    async def start(cls, taskset: str, settings: Mapping[str, Any]) -> _Served:
        served = cls(_load(taskset, settings))
        await served._serving.__aenter__()
        return served

    def task(self, index: int) -> Any:
        """Raises IndexError where the taskset has fewer."""
        self._tasks += islice(self._unread, max(0, index + 1 - len(self._tasks)))
        return self._tasks[index]


@dataclass(kw_only=True, eq=False)
class VerifiersTask(Task):
    """The tasks of a taskset of verifiers, as the harness first asks about them; a tenth of them is for validation.

    `train_size` and `validation_size` are limits. What only an environment of several turns says first, such as a
    game's board, is known once its episode has begun, and so each is begun here. Raises ConfigError where there is no
    task.
    """

    tenths: ClassVar[tuple[TaskSplit, ...]] = ("validation",) + ("train",) * 9

    taskset: str
    settings: Mapping[str, Any] = field(default_factory=dict)

    def problem(self, random_source: random.Random) -> Row:
        return random_source.choice(self.rows("train"))

    def rows(self, split: TaskSplit) -> list[Row]:
        environment = _load(self.taskset, self.settings)
        size = self.train_size if split == "train" else self.validation_size
        chosen = (task for task in environment.taskset if split_of(task.hash, self.tenths) == split)
        tasks = list(islice(chosen, size))
        if not tasks:
            raise ConfigError(f"task.taskset={self.taskset!r} has no task for {split}")
        openings = [_opening(task) for task in tasks]
        if self._asked(environment, tasks[:1]) != openings[:1]:
            openings = self._asked(environment, tasks)
        return [_row(task, opening) for task, opening in zip(tasks, openings, strict=True)]

    def _asked(self, environment: Any, tasks: Sequence[Any]) -> list[list[Message]]:
        requests = asyncio.run(_first_requests(environment, tasks))
        return [[plain(each) for each in request.messages] for request in requests]


def _opening(task: Any) -> list[Message]:
    """Return what a chat loop that adds nothing asks first."""
    data = task.data
    system = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
    given = [{"role": "user", "content": data.prompt}] if isinstance(data.prompt, str) else data.prompt or []
    return [*system, *(plain(each if isinstance(each, dict) else each.model_dump()) for each in given)]


def _row(task: Any, opening: list[Message]) -> Row:
    own = {
        name: value
        for name, value in task.data.model_dump(mode="json").items()
        if name not in _package().TaskData.model_fields
    }
    return {**own, "prompt": opening, "messages": opening, "idx": task.data.idx}
