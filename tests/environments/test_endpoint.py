"""The chat endpoint: a program that asks a model gets the policy's turns, and what it appends is the reply."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from rhymerl.environments.adapters.endpoint import ChatEndpoint, appended, message_of, plain

aiohttp = pytest.importorskip("aiohttp")
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
QUESTION = {"role": "user", "content": "1 + 1?"}


def test_thoughts_and_calls_stand_apart_from_what_is_said() -> None:
    message = message_of(f"<think>\nhm\n</think>\n\nSo: {CALL}", 3, "hermes")
    assert message == {
        "role": "assistant",
        "content": f"So: {CALL}",
        "reasoning_content": "hm",
        "tool_calls": [
            {
                "index": 0,
                "id": "000030000",
                "type": "function",
                "function": {"name": "add", "arguments": '{"a": 1}'},
            }
        ],
    }


@pytest.mark.parametrize(
    ("text", "calls"),
    [("It is 2.", "hermes"), (f"{CALL}<tool_call>{{add}}</tool_call>", "hermes"), (CALL, None)],
)
def test_a_turn_without_calls_or_with_a_malformed_one_is_text(text: str, calls: Any) -> None:
    assert message_of(text, 0, calls) == {"role": "assistant", "content": text}


def test_a_reply_is_what_is_appended_behind_the_turn() -> None:
    result = {"role": "tool", "content": [{"type": "text", "text": "2"}], "tool_call_id": "x", "name": "add"}
    said = {"role": "assistant", "content": "as the program tells it"}
    assert appended([QUESTION], [{**QUESTION, "name": None}, said, result]) == [{**result, "content": "2"}]


@pytest.mark.parametrize(
    "now",
    [
        [{"role": "user", "content": "1 + 2?"}, {"role": "assistant", "content": ""}, QUESTION],
        [QUESTION, QUESTION],
        [QUESTION],
        [{"role": "system", "content": "Be brief."}, QUESTION, {"role": "assistant", "content": ""}, QUESTION],
    ],
)
def test_a_conversation_that_is_rewritten_is_refused(now: list[dict[str, Any]]) -> None:
    with pytest.raises(ValueError, match="does not go on from the one before"):
        appended([QUESTION], now)


def test_pictures_are_refused() -> None:
    with pytest.raises(ValueError, match="not text alone"):
        plain({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]})


@pytest.mark.parametrize("streams", [False, True])
def test_a_request_waits_for_its_turn(streams: bool) -> None:
    async def ask(url: str) -> str:
        body = {"model": "m", "messages": [QUESTION], "tools": [{"type": "function"}], "stream": streams}
        async with aiohttp.ClientSession() as client, client.post(f"{url}/chat/completions", json=body) as response:
            assert response.status == 200
            return await response.text()

    async def run() -> str:
        endpoint = ChatEndpoint()
        await endpoint.start()
        try:
            asked = asyncio.create_task(ask(endpoint.url))
            request = await endpoint.requests.get()
            assert (request.messages, request.tools) == ([QUESTION], [{"type": "function"}])
            assert not asked.done()
            request.answer.set_result(message_of(CALL, 0, "hermes"))
            return await asked
        finally:
            await endpoint.close()

    text = asyncio.run(run())
    first, *rest = text.removeprefix("data: ").split("\n\ndata: ")
    (choice,) = json.loads(first)["choices"]
    assert choice["delta" if streams else "message"] == message_of(CALL, 0, "hermes")
    assert choice["finish_reason"] == "tool_calls"
    assert rest == (["[DONE]\n\n"] if streams else [])


def test_an_endpoint_ends_though_somebody_waits() -> None:
    async def run() -> int:
        endpoint = ChatEndpoint()
        await endpoint.start()
        async with aiohttp.ClientSession() as client:
            asked = asyncio.create_task(client.post(f"{endpoint.url}/chat/completions", json={"messages": [QUESTION]}))
            await endpoint.requests.get()
            await asyncio.wait_for(endpoint.close(), 20)
            return (await asked).status

    assert asyncio.run(run()) == 503
