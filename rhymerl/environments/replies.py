"""The check of what user code returns as a reply, in the process in which it runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite, nan
from typing import Any

from rhymerl.environments.base import Reply


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
