"""A chat endpoint on this machine whose completions are turns of the policy, for programs that ask a model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rhymerl.environments.calls import CallFormat, read_calls

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """What a program asks of a model, which waits until `answer` is set to an assistant's message."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]]
    answer: asyncio.Future[Message]


class ChatEndpoint:
    """Takes chat completions of OpenAI's interface at `url`, streamed ones too, and puts them into `requests`."""

    def __init__(self) -> None:
        self.requests: asyncio.Queue[ChatRequest] = asyncio.Queue()
        self.url = ""
        self._answers: set[asyncio.Future[Message]] = set()  # that are waited for
        self._runner: Any = None

    async def start(self) -> None:
        """Listen on a free port, for programs on this machine alone."""
        from aiohttp import web

        app = web.Application(client_max_size=2**30)
        app.router.add_post("/v1/chat/completions", self._complete)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}/v1"

    async def close(self) -> None:
        """Refuse the requests that wait for an answer."""
        for answer in self._answers:
            answer.cancel()
        await self._runner.cleanup()

    async def _complete(self, request: Any) -> Any:
        from aiohttp import web

        body = await request.json()
        answer: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self.requests.put_nowait(ChatRequest(messages=body["messages"], tools=body.get("tools") or (), answer=answer))
        self._answers.add(answer)
        await asyncio.wait([answer])
        self._answers.discard(answer)
        if answer.cancelled():
            return web.Response(status=503)
        message = answer.result()
        if not body.get("stream"):
            return web.json_response(_completion(message, "message", "chat.completion"))
        chunk = json.dumps(_completion(message, "delta", "chat.completion.chunk"))
        return web.Response(body=f"data: {chunk}\n\ndata: [DONE]\n\n".encode(), content_type="text/event-stream")


def _completion(message: Message, part: str, kind: str) -> dict[str, Any]:
    reason = "tool_calls" if message.get("tool_calls") else "stop"
    usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
    choice = {"index": 0, part: message, "finish_reason": reason}
    return {"id": "turn", "object": kind, "created": 0, "model": "policy", "choices": [choice], "usage": usage}


def message_of(text: str, number: int, calls: CallFormat | None) -> Message:
    """Return a turn's text, the episode's `number`-th, as a server of models would: thoughts and calls apart.

    A turn with a malformed call has none: it is text.
    """
    thoughts, has_thoughts, said = text.rpartition("</think>")
    message: dict[str, Any] = {"role": "assistant", "content": said.lstrip() if has_thoughts else text}
    if has_thoughts:
        message["reasoning_content"] = thoughts.removeprefix("<think>").strip()
    found = [] if calls is None else read_calls(text, calls)
    if found and not any(call.error for call in found):
        message["tool_calls"] = [
            {
                "index": index,
                "id": call.id or f"{number % 10**5:05}{index:04}",
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
            }
            for index, call in enumerate(found)
        ]
    return message


def appended(before: Sequence[Message], now: Sequence[Message]) -> list[Message]:
    """Return what a program has appended after the policy's turn. Raises ValueError if it did anything else."""
    kept, turn, new = now[: len(before)], now[len(before) : len(before) + 1], now[len(before) + 1 :]
    if [plain(each) for each in kept] != [plain(each) for each in before] or [each["role"] for each in turn] != [
        "assistant"
    ]:
        raise ValueError("the program asks with a conversation that does not go on from the one before")
    return [plain(each) for each in new]


def plain(message: Message) -> Message:
    """Return a message with text alone. Raises ValueError for pictures and the like."""
    content = message.get("content") or ""
    if not isinstance(content, str):
        if any(part.get("type") != "text" for part in content):
            raise ValueError("the program sends a message that is not text alone")
        content = "".join(part["text"] for part in content)
    names = {name: message[name] for name in ("name", "tool_call_id") if message.get(name)}
    return {"role": message["role"], **names, "content": content}
