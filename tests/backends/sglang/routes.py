"""The plugin's route without SGLang around it, and an engine that has it."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rhymerl.backends.remote.drafter_feed import Counters, FeedReader
from rhymerl.backends.remote.wire import feed_of
from rhymerl.backends.sglang.plugin.route import FeedRoute
from rhymerl.drafters import Drafter
from tests.backends.sglang.fake_engine import FakeEngine


def asked(route: FeedRoute, method: str, pieces: Iterable[bytes] = (b"",)) -> tuple[int, Any]:
    """Return status and content of the route's answer to a request whose body comes in these pieces."""
    *before, last = pieces
    events = [{"type": "http.request", "body": each, "more_body": True} for each in before]
    events.append({"type": "http.request", "body": last})
    return answered(route, method, events)


def answered(route: FeedRoute, method: str, events: list[dict[str, Any]]) -> tuple[int, Any]:
    """The same, from the events that a server tells the application."""
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return events.pop(0)

    async def send(event: Any) -> None:
        sent.append(event)

    asyncio.run(route({"type": "http", "method": method}, receive, send))
    start, body = sent
    assert dict(start["headers"])[b"content-length"] == str(len(body["body"])).encode()
    return int(start["status"]), json.loads(body["body"])


class Follower(Drafter):
    """Knows the answers that it was told of, by split and prompt."""

    def __init__(self) -> None:
        self.known: dict[tuple[str, str], list[list[int]]] = {}
        self.num_snapshots = 0

    def propose(self, request, context, budget):
        raise NotImplementedError

    def follow(self, delta):
        if delta.is_snapshot:
            self.known, self.num_snapshots = {}, self.num_snapshots + 1
        for change in delta:
            name = change.split, change.key
            known = [] if change.is_forgotten else self.known.pop(name, [])
            self.known.pop(name, None)
            if known or change.added:
                self.known[name] = [*known, *(each.token_ids.tolist() for each in change.added)]


class HistoryEngine(FakeEngine):
    """Its drafter reads a trainer's messages as far as a request needs; `before` has what it knew, by request."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        super().__init__(**settings)
        self.folder = folder
        self.num_starts = 0
        self.before: dict[str, list[list[int]]] = {}
        self._reading = threading.Lock()
        self.start_anew()

    def start_anew(self) -> None:
        """Forget everything, as the process of a server does that is started once more."""
        self.num_starts += 1
        folder = self.folder / str(self.num_starts)
        folder.mkdir(parents=True)
        counters = folder / "counters"
        Counters(counters, new=True)
        self.route, self.drafter, self.counters = FeedRoute(folder), Follower(), Counters(counters)
        self.reader = FeedReader(folder / "feed", self.drafter)

    def on_rhymerl_feed(self, content: Any) -> tuple[int, Any]:
        return asked(self.route, "POST", [content]) if isinstance(content, bytes) else asked(self.route, "GET")

    def on_generate(self, content: dict[str, Any]) -> tuple[int, Any] | None:
        params = content["sampling_params"].get("custom_params")
        with self._reading:
            self.reader.catch_up(feed_of(params))
            if params is not None:
                own = params["rhymerl"]
                self.before[own["id"]] = list(self.drafter.known.get((own["split"], own["prompt_key"]), ()))
        return super().on_generate(content)
