"""The drafter of a server that runs already: the plugin's route there takes what it is told, and says what it has counted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rhymerl.backends.remote.client import Client
from rhymerl.backends.remote.counters import NAMES, Counters
from rhymerl.backends.remote.drafter_feed import LARGEST_BYTES, ROUTE, FeedMessage
from rhymerl.errors import BackendError
from rhymerl.history.files import to_bytes
from rhymerl.history.packing import pack_delta


class FeedSender:
    """Sends the history; `version` is that of its latest message there. It grows by more than one where somebody else sends some, too."""

    def __init__(self, engine: Client, *, timeout_s: float) -> None:
        self.engine = engine
        self.timeout_s = timeout_s
        self.version = 0

    def write(self, feed: FeedMessage) -> None:
        """Send the next change. Raises BackendError for one that is too large, and as `Client.post` does."""
        assert feed.delta is not None, "samples do not travel"
        content = to_bytes(pack_delta(feed.delta))
        if len(content) > LARGEST_BYTES:
            raise BackendError(
                f"{len(content)} bytes of history for {self.engine.url}: at most {LARGEST_BYTES} can be sent at once"
            )
        self.version = int(self.engine.post(ROUTE, content, timeout_s=self.timeout_s)["version"])


class ServedCounters(Counters):
    """The counts from when this is made, as they were when `since` was last called."""

    def __init__(self, engine: Client) -> None:
        self._engine = engine
        self._before = self._asked()
        self._values, self._reported = np.zeros((2, len(NAMES)))

    def since(self) -> Mapping[str, float]:
        """Ask for the counts, and return those since the last call. Raises BackendError as `Client.get` does."""
        self._values = self._asked() - self._before
        return super().since()

    def _asked(self) -> npt.NDArray[np.float64]:
        counts = self._engine.get(ROUTE)["counters"]
        return np.array([counts.get(name, 0.0) for name in NAMES])


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedDrafter:
    """The feed and the counters, as `OwnEngine` has them."""

    feed: FeedSender
    counters: ServedCounters

    @classmethod
    def at(cls, engine: Client, *, timeout_s: float) -> ServedDrafter | None:
        """Return that of a server, None where it has no route of ours. Raises BackendError as `Client.get` does."""
        if engine.get_if_known(ROUTE) is None:
            return None
        return cls(feed=FeedSender(engine, timeout_s=timeout_s), counters=ServedCounters(engine))
