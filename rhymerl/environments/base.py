"""The interface of environments: what answers the policy between its turns."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite, nan
from typing import Any, Self, TypeAlias, TypeVar

Content: TypeAlias = str | Sequence[Mapping[str, Any]]  # text that is appended as it is, or chat messages


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One turn of the policy: `Turn(text="<tool_call>…</tool_call>", reply=[{"role": "tool", "content": "42"}])`.

    `text` has its special tokens, but for the end of the turn. `reply` is None for the last turn, which has none yet.
    """

    text: str
    reply: Content | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What an environment says to a turn, and what the turn has earned.

    With `done` the episode is over, and `content` is not shown to the policy. `reward` is for this turn alone, None
    where the environment gives none; `metrics` are logged as the mean over turns.
    """

    content: Content | None = None
    reward: float | None = None
    done: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def is_end(self) -> bool:
        return self.done or self.content is None


Answer: TypeAlias = Reply | Content | None  # None: the episode is over


def checked_reply(value: Any) -> Reply:
    """Return an environment's reply as plain data. Raises TypeError or ValueError, in one line, for invalid ones."""
    reply = value if isinstance(value, Reply) else Reply(content=value)
    content: Any = reply.content
    if isinstance(content, Mapping):
        content = [content]
    if content is not None and not isinstance(content, str):
        content = _checked_messages(content)
    if content is not None and not len(content) and not reply.done:
        raise ValueError(f"it returned {content!r}, expected a reply, or None where the episode is over")
    reward = None if reply.reward is None else _number(reply.reward, "reward")
    metrics = {str(name): _number(each, f"metrics[{name!r}]") for name, each in dict(reply.metrics).items()}
    return Reply(content=content, reward=reward, done=bool(reply.done), metrics=metrics)


def _checked_messages(messages: Any) -> list[dict[str, Any]]:
    if not isinstance(messages, Sequence) or isinstance(messages, bytes):
        raise TypeError(f"it returned {messages!r:.80}, expected text, chat messages, a Reply or None")
    for message in messages:
        if not isinstance(message, Mapping) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
            raise TypeError(
                f"it returned the message {message!r:.80}, expected one with the strings 'role' and 'content'"
            )
        if message["role"] == "assistant":
            raise ValueError("it returned a message of the assistant, whose turns are the policy's to write")
    return [dict(message) for message in messages]


def _number(value: Any, what: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = nan
    if not isfinite(number):
        raise ValueError(f"its {what} is {value!r:.80}, expected a finite number")
    return number


def transcript_key(row: Mapping[str, Any], turns: Sequence[Turn]) -> object:
    """Return all that a reply can follow from: the row, and all that has been said and replied."""
    return dict(row), json.dumps([[turn.text, turn.reply] for turn in turns])


class Environment(ABC):
    """Something that the policy acts on, turn by turn. Subclasses write `reply`.

    An environment is a function of the transcript: it keeps nothing between two calls, so an episode can move to
    another process, and be resumed, without a word to it. One that cannot do without a state opens a session for each
    episode.
    """

    #: Whether the same transcript of the same row always gets the same reply, which is then remembered.
    is_pure: bool = False

    @property
    def tool_schemas(self) -> Sequence[Mapping[str, Any]]:
        """The JSON schemas of its tools, which the chat template is given as `tools`; none by default."""
        return ()

    def prepare(self, tokenizer: Any) -> Self:
        """Return the environment for this tokenizer.

        Called once, in the trainer's process, before any compute. Raises ValueError, in one line that names the
        argument, where the environment cannot work here.
        """
        return self

    @property
    def has_sessions(self) -> bool:
        """Return whether `open` returns sessions, by default if a subclass has it; then replies are not remembered."""
        return type(self).open is not Environment.open

    @abstractmethod
    def reply(self, row: Mapping[str, Any], turns: Sequence[Turn]) -> Answer | Awaitable[Answer]:
        """Answer the last of `turns`: with text, chat messages, a `Reply`, or None when the episode is over.

        `row` has the columns of the prompt. What it raises costs this episode, not the run.
        """

    def memory_key(self, row: Mapping[str, Any], turns: Sequence[Turn]) -> object:
        """Return what the reply to the last of `turns` follows from, as picklable data; asked only where it `is_pure`.

        Equal keys share a reply, whichever episode asks. By default they are equal rows with equal transcripts. Called
        in the process of the worker, so it has to be quick.
        """
        return transcript_key(row, turns)

    def open(self, row: Mapping[str, Any]) -> Environment | Awaitable[Environment | None] | None:
        """Open a live session for one episode, whose `reply` is then asked instead; None: the environment needs none.

        One that was lost is replaced by another, which is asked about each of the turns again, in order.
        """
        return None

    def close(self) -> Awaitable[None] | None:
        """End a session: once, when its episode is over or goes on elsewhere, unless its process has been killed."""


Function = TypeVar("Function", bound=Callable[..., Any])


def pure(function: Function) -> Function:
    """Mark a tool as pure, `@pure`: equal arguments get equal results. Only replies of such tools are remembered."""
    function.is_pure = True  # type: ignore[attr-defined]
    return function


def is_remembered(environment: Any) -> bool:
    """Return whether replies may be remembered: the environment, or a task that replies, declares itself pure."""
    return bool(environment.is_pure and not environment.has_sessions)
