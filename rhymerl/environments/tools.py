"""Tools: functions that the policy calls, and an environment that runs the calls."""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self

from rhymerl.environments.base import Environment, Reply, Turn
from rhymerl.environments.calls import FAMILIES, CallFormat, ToolCall, family_of, read_calls
from rhymerl.environments.schema import MisfitArgumentError, Schema, fitted
from rhymerl.errors import RhymeError, at_least, check_ranges, did_you_mean
from rhymerl.rewards.calls import Attempt
from rhymerl.rewards.resolve import find

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_OF_EPISODE = ("reset", "close")  # methods that are no tools
_MAX_ERROR_CHARACTERS = 500
_MAX_BRACKETS = 200  # no text with fewer is nested too deeply to be read


class Tool(NamedTuple):
    """A function, or a method of `owner`, and its schema as a chat template is given it."""

    schema: Mapping[str, Any]
    function: Callable[..., Any]
    owner: type | None

    @property
    def name(self) -> str:
        return self.function.__name__


def call_format(tokenizer: Any, schemas: Sequence[Mapping[str, Any]]) -> CallFormat:
    """Return the way in which the policy calls these tools. Raises ValueError where nothing says it.

    It is transformers' parser for other families only: its time grows with the square of the number of calls.
    """
    has_template = bool(getattr(tokenizer, "chat_template", None))
    family = family_of(tokenizer.get_chat_template(tools=[*schemas])) if has_template else None
    found: CallFormat | None = family or getattr(tokenizer, "response_template", None)
    if found is None:
        lack = "writes tool calls in no way that is known" if has_template else "is missing"
        raise ValueError(f"calls=None: the chat template {lack}; expected one of {', '.join(FAMILIES)}")
    return found


@dataclass(kw_only=True, eq=False)
class Tools(Environment):
    """Runs the calls in what the policy says, in order, and replies with their results: messages of the role `tool`.

    `tools` are functions with type hints and a docstring that describes each argument (under `Args:`), or their dotted
    names. Of a class every public method with a docstring is a tool: an object of it is made for each episode, without
    arguments. If it has a method `reset`, this gets the row's columns; a method `close` ends it. Tools may be `async`.

    An episode is over when a turn calls nothing, or when a tool returns a `Reply` that is done. A malformed or unknown
    call, an argument that does not fit and a tool that raises are messages to the policy, in one line; only a
    RhymeError, by which a tool says that it cannot work at all, fails the episode. Results that are no text are shown
    as JSON.

    Replies are remembered where all tools are functions marked as `pure`.

    `calls` is the way in which the policy writes calls: a family of chat templates, or a response template of
    transformers. None = the family of its chat template, else its tokenizer's response template. Raises ValueError.
    """

    tools: Sequence[str | Callable[..., Any]] = ()
    calls: CallFormat | None = None
    max_calls: int = at_least(1, 32)  # in one turn; those beyond it are not run
    max_result_characters: int = at_least(1, 10_000)  # then the result is cut, with a mark
    _tools: dict[str, Tool] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        check_ranges(self)
        if isinstance(self.tools, str) or not self.tools:
            raise ValueError(f"tools={self.tools!r}: expected a list of functions or their dotted names, at least one")
        if isinstance(self.calls, str) and self.calls not in FAMILIES:
            raise ValueError(f"calls={self.calls!r}: expected one of {', '.join(FAMILIES)}")
        tools = [tool for given in self.tools for tool in _tools_of(given)]
        if doubled := [name for name, count in Counter(tool.name for tool in tools).items() if count > 1]:
            raise ValueError(f"tools: two have the name {doubled[0]!r}")
        self._tools = {tool.name: tool for tool in tools}
        self.is_pure = all(getattr(tool.function, "is_pure", False) for tool in tools)

    @property
    def tool_schemas(self) -> Sequence[Mapping[str, Any]]:
        return [tool.schema for tool in self._tools.values()]

    @property
    def owners(self) -> list[type]:
        """The classes of which each episode has an object."""
        return list(dict.fromkeys(tool.owner for tool in self._tools.values() if tool.owner is not None))

    def prepare(self, tokenizer: Any) -> Self:
        """Raise ValueError if nothing says how the policy writes calls, and for a class that cannot be instantiated."""
        for owner in self.owners:
            with Attempt() as attempt:
                _close(owner())
            if isinstance(attempt.error, RhymeError):
                raise attempt.error
            if attempt.error is not None:
                raise ValueError(f"tools: {owner.__qualname__} cannot be made: {attempt.message}") from attempt.error
        return self if self.calls is not None else replace(self, calls=call_format(tokenizer, self.tool_schemas))

    def memory_key(self, row: Mapping[str, Any], turns: Sequence[Turn]) -> object:
        """Functions see their arguments alone, and the ids of calls without one count turns: other words play no part.

        Nor is anything else read of what a deeply nested text says, or one that takes transformers' parser. A subclass
        may reply by more.
        """
        if type(self) is not Tools:
            return super().memory_key(row, turns)
        text, number = turns[-1].text, len(turns)
        if not isinstance(self.calls, str) or text.count("{") + text.count("[") > _MAX_BRACKETS:
            return text, number
        calls = read_calls(text, self.calls)
        return json.dumps([[call.name, call.arguments, call.id or number, call.error] for call in calls])

    @property
    def has_sessions(self) -> bool:
        return bool(self.owners)

    def open(self, row: Mapping[str, Any]) -> Environment | None:
        return _Session(self, row) if self.owners else None

    def reply(self, row: Mapping[str, Any], turns: Sequence[Turn]) -> Reply | None:
        """Reply without a session: one is made for this reply, and tools with state run the turns before again."""
        session = _Session(self, row)
        first = 1 if self.owners else len(turns)
        try:
            return [session.reply(row, turns[:number]) for number in range(first, len(turns) + 1)][-1]
        finally:
            session.close()

    def reply_to(self, turn: Turn, number: int, objects: Mapping[type, object]) -> Reply | None:
        """Run the calls of one turn, the episode's `number`-th; `objects` are those of this episode, by class."""
        if self.calls is None:
            raise ValueError("calls=None: expected a family of chat templates; `prepare(tokenizer)` finds it")
        calls = read_calls(turn.text, self.calls)
        if len(calls) > self.max_calls:
            calls[self.max_calls :] = [ToolCall(error=f"only the first {self.max_calls} calls of a turn are run")]
        messages: list[Mapping[str, Any]] = []
        results: list[Reply] = []
        for index, call in enumerate(calls):
            results.append(self._run(call, objects))
            # Some templates of Mistral's ask for an id of nine characters.
            call_id = call.id or f"{number % 10**5:05}{index:04}"
            content = results[-1].content
            messages.append({"role": "tool", "name": call.name, "tool_call_id": call_id, "content": content})
            if results[-1].done:
                break
        return _merged(messages, results) if calls else None

    def _run(self, call: ToolCall, objects: Mapping[type, object]) -> Reply:
        """Return the call's result, or its error, as text."""
        with Attempt() as attempt:
            result = self._result(call, objects)
            given = result if isinstance(result, Reply) else None
            return replace(given or Reply(), content=self._as_text(given.content or "" if given else result))
        error = attempt.error
        if isinstance(error, RhymeError):
            raise error
        assert error is not None, "or there had been a result"
        is_ours = isinstance(error, MisfitArgumentError)
        words = str(error) if is_ours else traceback.format_exception_only(error)[-1]
        content = self._as_text(f"error: {' '.join(words.split())}"[:_MAX_ERROR_CHARACTERS])
        return Reply(content=content, metrics={"tool_errors": 1.0})

    def _result(self, call: ToolCall, objects: Mapping[type, object]) -> Any:
        if call.error:
            raise MisfitArgumentError(call.error)
        tool = self._tools.get(call.name)
        if tool is None:
            hint = did_you_mean(call.name, self._tools) or f"; expected one of {', '.join(self._tools)}"
            raise MisfitArgumentError(f"there is no tool {call.name!r:.80}{hint}")
        arguments = _arguments(call, tool.schema["function"]["parameters"])
        function = tool.function if tool.owner is None else getattr(objects[tool.owner], tool.name)
        result = function(**arguments)
        return asyncio.run(result) if inspect.iscoroutine(result) else result

    def _as_text(self, result: Any) -> str:
        """Raises TypeError or ValueError for what JSON cannot say."""
        text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)
        text = text.encode(errors="replace").decode()  # halves of surrogate pairs, which no tokenizer takes
        excess = len(text) - self.max_result_characters
        return text if excess <= 0 else f"{text[: self.max_result_characters]}… [{excess} more characters]"


class _Session(Environment):
    """One episode's objects."""

    def __init__(self, tools: Tools, row: Mapping[str, Any]) -> None:
        self._tools = tools
        self._objects: dict[type, Any] = {}
        for owner in tools.owners:
            self._objects[owner] = owner()
            if hasattr(owner, "reset"):
                self._objects[owner].reset(**row)

    def reply(self, row: Mapping[str, Any], turns: Sequence[Turn]) -> Reply | None:
        return self._tools.reply_to(turns[-1], len(turns) - 1, self._objects)

    def close(self) -> None:
        for made in self._objects.values():
            _close(made)


def _close(made: object) -> None:
    if hasattr(made, "close"):
        made.close()


def _merged(messages: Sequence[Mapping[str, Any]], results: Sequence[Reply]) -> Reply:
    rewards = [result.reward for result in results if result.reward is not None]
    metrics = Counter({"tool_calls": float(len(results)), "tool_errors": 0.0})
    for result in results:
        metrics.update(result.metrics)
    return Reply(
        content=messages, reward=sum(rewards) if rewards else None, done=results[-1].done, metrics=dict(metrics)
    )


def _arguments(call: ToolCall, parameters: Schema) -> dict[str, Any]:
    known: Mapping[str, Schema] = parameters["properties"]
    for name in call.arguments:
        if name not in known:
            raise MisfitArgumentError(f"{call.name} has no argument {name!r:.80}{did_you_mean(name[:80], known)}")
    for name in parameters.get("required", ()):
        if name not in call.arguments:
            raise MisfitArgumentError(f"{call.name} needs the argument {name!r}")
    return {name: fitted(value, known[name], name=name) for name, value in call.arguments.items()}


def _tools_of(given: str | Callable[..., Any]) -> Iterator[Tool]:
    target = find(given, argument=f"tools={given!r}").target if isinstance(given, str) else given
    shown = given if isinstance(given, str) else getattr(given, "__qualname__", repr(given))
    if not isinstance(target, type):
        yield _tool(target, shown)
        return
    parameters = inspect.signature(target).parameters.values()
    if needed := [each.name for each in parameters if each.default is each.empty and each.kind < each.VAR_POSITIONAL]:
        raise ValueError(f"tools: {shown} is to be made without arguments, and needs {', '.join(needed)}")
    names = [name for name in dir(target) if not name.startswith("_") and name not in _OF_EPISODE]
    methods = [method for name in names if inspect.isroutine(method := getattr(target, name)) and method.__doc__]
    if not methods:
        raise ValueError(f"tools: {shown} has no public method with a docstring")
    for method in methods:
        yield _tool(method, f"{shown}.{method.__name__}", owner=target)


def _tool(function: Any, shown: str, owner: type | None = None) -> Tool:
    from transformers.utils.chat_template_utils import (
        DocstringParsingException,
        TypeHintParsingException,
        get_json_schema,
    )

    if not inspect.isroutine(function):
        raise ValueError(f"tools: {shown} is of type {type(function).__name__}, expected a function or a class")
    if not _NAME.fullmatch(function.__name__):
        raise ValueError(f"tools: {shown}: chat templates carry no such name, expected {_NAME.pattern}")
    try:
        parameters = inspect.signature(function).parameters
        schema = get_json_schema(function)
    except (DocstringParsingException, TypeHintParsingException, ValueError, NameError, TypeError) as error:
        raise ValueError(f"tools: {shown}: {str(error).partition(chr(10))[0]}") from error
    if owner is None and "self" in parameters:
        raise ValueError(f"tools: {shown} is a method; expected its class")
    if any(each.kind not in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY) for each in parameters.values()):
        raise ValueError(f"tools: {shown}: expected arguments that can be given by name, no *args, **kwargs or /")
    return Tool(schema, function, owner)
