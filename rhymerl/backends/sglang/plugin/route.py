"""The route of a server that was started by hand, by which a trainer's history reaches the drafter.

It is an ASGI application among SGLang's own routes, and as open as these, by which anybody can change the weights.
`POST` takes a change of the history, and answers with the version that requests name; `GET` answers with the newest
version and what the drafter has counted.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any

from rhymerl.backends.remote.drafter_feed import LARGEST_BYTES, ROUTE, Counters, FeedWriter, message_of
from rhymerl.backends.sglang.plugin.settings import COUNTERS, FEED
from rhymerl.errors import DataError

_Answer = tuple[int, Mapping[str, Any]]  # status, content


class FeedRoute:
    """Writes each message whole, or not at all, to the folder that the drafter reads."""

    def __init__(self, folder: Path) -> None:
        self._writer = FeedWriter(folder / FEED)
        self._counters = Counters(folder / COUNTERS)
        self._lock = threading.Lock()

    async def __call__(
        self,
        scope: Mapping[str, Any],
        receive: Callable[[], Awaitable[Mapping[str, Any]]],
        send: Callable[[Mapping[str, Any]], Awaitable[None]],
    ) -> None:
        status, answer = await self._answer(scope["method"], receive)
        body = json.dumps(answer).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _answer(self, method: str, receive: Callable[[], Awaitable[Mapping[str, Any]]]) -> _Answer:
        if method == "GET":
            return HTTPStatus.OK, {"version": self._writer.version, "counters": self._counters.totals()}
        if method != "POST":
            return HTTPStatus.METHOD_NOT_ALLOWED, {"error": f"{method}: expected GET or POST"}
        body, is_whole = bytearray(), False
        while not is_whole:
            event = await receive()
            body += event.get("body", b"")
            if len(body) > LARGEST_BYTES:
                return HTTPStatus.REQUEST_ENTITY_TOO_LARGE, {"error": f"expected at most {LARGEST_BYTES} bytes"}
            is_whole = not event.get("more_body", False)
        return await asyncio.to_thread(self._take, bytes(body))

    def _take(self, body: bytes) -> _Answer:
        try:
            feed = message_of(body)
            with self._lock:
                self._writer.write(feed)
                return HTTPStatus.OK, {"version": self._writer.version}
        except DataError as error:
            return HTTPStatus.BAD_REQUEST, {"error": str(error)}
        except OSError as error:
            return HTTPStatus.INSUFFICIENT_STORAGE, {"error": f"it cannot be written: {error}"}


def install(folder: Path) -> None:
    """Add the route to SGLang's; once, in the process that serves HTTP. The drafter reads in the same `folder`."""
    from sglang.srt.entrypoints import http_server

    http_server.app.add_route(ROUTE, FeedRoute(folder))
