"""The drafter of a server that runs already: the plugin's route takes messages and reports the drafter's counters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rhymerl.backends.remote.client import Client
from rhymerl.backends.remote.drafter_feed import COUNTS, LARGEST_BYTES, ROUTE, Counters, FeedMessage
from rhymerl.errors import BackendError
from rhymerl.history.files import to_bytes
from rhymerl.history.packing import pack_delta


class FeedSender:
    """Sends the history; `version` is the latest message's there, and skips some if others send messages too."""

    def __init__(self, engine: Client) -> None:
        self.engine = engine
        self.version = 0

    def write(self, feed: FeedMessage) -> None:
        """Send the next change. Raises BackendError for one that is too large, and as `Client.post` does."""
        assert feed.delta is not None, "samples do not travel"
        content = to_bytes(pack_delta(feed.delta))
        if len(content) > LARGEST_BYTES:
            raise BackendError(
                f"{len(content)} bytes of history for {self.engine.url}: at most {LARGEST_BYTES} can be sent at once"
            )
        self.version = _number(self.engine.post(ROUTE, content), "version", self.engine)


class ServedCounters(Counters):
    """The counts from when this is made, as they were when `since` was last called."""

    def __init__(self, engine: Client) -> None:
        self._engine = engine
        self._before = self._asked()
        self._values, self._reported, self._begun = np.zeros((3, len(COUNTS)))

    def since(self) -> Mapping[str, float]:
        """Ask for the counts, and return those since the last call. Raises BackendError as `Client.get` does."""
        self._values = self._asked() - self._before
        return super().since()

    def _asked(self) -> npt.NDArray[np.float64]:
        answer = self._engine.get(ROUTE)
        if not _is_ours(answer):
            raise _unknown(answer, self._engine)
        counts = answer["counters"]
        return np.array([counts.get(name, 0.0) for name in COUNTS], np.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedDrafter:
    """The feed and the counters, as `OwnEngine` has them."""

    feed: FeedSender
    counters: ServedCounters

    @classmethod
    def at(cls, engine: Client) -> ServedDrafter | None:
        """Return the drafter of a server, None without our route. Raises BackendError as `Client.get` does."""
        if not _is_ours(engine.get_if_known(ROUTE)):
            return None
        return cls(feed=FeedSender(engine), counters=ServedCounters(engine))


def _is_ours(answer: Any) -> bool:
    """Return whether the route has answered, and not some page that stands where it would be."""
    counts = answer.get("counters") if isinstance(answer, dict) else None
    return isinstance(counts, dict) and all(isinstance(value, int | float) for value in counts.values())


def _number(answer: Any, name: str, engine: Client) -> int:
    value = answer.get(name) if isinstance(answer, dict) else None
    if not isinstance(value, int):
        raise _unknown(answer, engine)
    return value


def _unknown(answer: Any, engine: Client) -> BackendError:
    return BackendError(
        f"the SGLang engine at {engine.url} answered {ROUTE} with what is not rhymerl's: {str(answer)[:200]}"
    )
