"""The trainer's messages to an engine's drafter: history and scored samples, in numbered files of one folder.

A request names the version of the feed that it needs, so nothing is sent on the engine's own wires. When the first
request of a step arrives, the drafter has read all messages of the step before. Each file is written whole, read once
and then removed by the reader. The trainer writes the files for an engine that it has started. To a server that runs
already it sends the history over HTTP, as plain data, and the plugin's route there writes them. What the drafter
counts comes back in one small shared file.
"""

from __future__ import annotations

import logging
import os
import pickle
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from rhymerl.drafters.base import Drafter
from rhymerl.errors import BackendError, DataError
from rhymerl.history import NO_VERSION, HistoryStore
from rhymerl.history.files import from_bytes
from rhymerl.history.packing import unpack_delta
from rhymerl.history.records import HistoryDelta
from rhymerl.types import Ratio, Sample

_log = logging.getLogger(__name__)
ROUTE = "/rhymerl/feed"
LARGEST_BYTES = 2**29  # of a message over HTTP
_MESSAGE_TOKENS = 2**24  # of history in a message; servers take some eight times as many
COUNTS = ("asks", "hits", "drafted_nodes", "bad_drafts", "draft_s", "passes", "row_passes", "nodes")


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedMessage:
    """The history's changes of one step, and its samples where the drafter learns from them."""

    delta: HistoryDelta | None = None
    samples: Sequence[Sample] = ()


def message_of(content: bytes) -> FeedMessage:
    """Return a change of the history that came over HTTP; nothing in it is executed.

    Raises DataError for anything that `pack_delta` has not made.
    """
    try:
        return FeedMessage(delta=unpack_delta(from_bytes(content)))
    except ValueError as error:
        raise DataError(f"history message: {error}") from error


class FeedWriter:
    """Writes the files; `folder` belongs to one engine and to nobody else, because they are unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.version = 0
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def write(self, feed: FeedMessage) -> None:
        path = _path(self.folder, self.version + 1)
        draft = path.with_suffix(".part")
        with draft.open("wb") as file:
            pickle.dump(feed, file, protocol=5)
        os.replace(draft, path)
        self.version += 1


class FeedReader:
    """The engine's side, where `drafter` is."""

    def __init__(self, folder: Path, drafter: Drafter) -> None:
        self.folder = folder
        self.drafter = drafter
        self.version = 0

    def catch_up(self, version: int) -> None:
        """Read all up to `version`. Raises BackendError when a file is missing."""
        while self.version < version:
            path = _path(self.folder, self.version + 1)
            try:
                feed: FeedMessage = pickle.loads(path.read_bytes())
            except FileNotFoundError as error:
                raise BackendError(
                    f"{path}: what the drafter is to read next is missing; was the folder cleaned?"
                ) from error
            try:
                if feed.samples:
                    self.drafter.learn(feed.samples)
                if feed.delta is not None:
                    self.drafter.follow(feed.delta)
            except Exception:
                _log.exception(
                    "rhymerl: %s failed on what the trainer tells it (%s)", type(self.drafter).__name__, path.name
                )
                raise
            self.version += 1
            path.unlink()


def _path(folder: Path, version: int) -> Path:
    return folder / f"{version:09d}.feed"


class Counters:
    """Counters in a file that two processes share: one calls `add`, the other `since`."""

    def __init__(self, path: Path, *, new: bool = False) -> None:
        if new:
            np.zeros(len(COUNTS)).tofile(path)
        self._values: npt.NDArray[np.float64] = np.memmap(path, np.float64, "r+", shape=(len(COUNTS),))
        self._begun = self._reported = np.array(self._values)

    def begin(self) -> None:
        """Count from now on, as if nothing had been before."""
        self.since()
        self._begun = self._reported

    def add(self, **amounts: float) -> None:
        for name, amount in amounts.items():
            self._values[COUNTS.index(name)] += amount

    def totals(self) -> Mapping[str, float]:
        return dict(zip(COUNTS, self._values.tolist(), strict=True))

    @property
    def nodes_a_pass(self) -> float | None:
        """Draft nodes of a request in a pass, on average; None before the first pass."""
        new = self._values - self._begun
        row_passes, nodes = (float(new[COUNTS.index(name)]) for name in ("row_passes", "nodes"))
        return nodes / row_passes if row_passes else None

    def since(self) -> Mapping[str, float]:
        now = np.array(self._values)
        new, self._reported = now - self._reported, now
        return dict(zip(COUNTS, new.tolist(), strict=True))


class Feed(Protocol):
    """The way of messages to a drafter; `version` is the newest one's."""

    version: int

    def write(self, feed: FeedMessage) -> None:
        """Send the next message."""


class RemoteDrafter:
    """The drafter in an engine, seen from the trainer: the feed that it reads, and what it has counted."""

    def __init__(self, feed: Feed, counters: Counters) -> None:
        self.feed = feed
        self.counters = counters
        self._followed = NO_VERSION
        self._reported_s = time.monotonic()

    def follow(self, history: HistoryStore) -> None:
        """Send what is new in the history; all of it where the drafter has missed something."""
        delta = history.deltas(self._followed)
        if not all(map(self._is_told, delta.parts(_MESSAGE_TOKENS))):
            delta = history.snapshot()
            all(map(self._is_told, delta.parts(_MESSAGE_TOKENS)))
        self._followed = delta.version

    def _is_told(self, part: HistoryDelta) -> bool:
        """Return False if the server was restarted, or got messages from another trainer."""
        expected = self.feed.version + 1
        self.feed.write(FeedMessage(delta=part))
        return part.is_snapshot or self.feed.version == expected

    def metrics(self, accepted: int) -> dict[str, float]:
        """Return the drafter's metrics since the last call, in which so many draft tokens were accepted."""
        new, now = self.counters.since(), time.monotonic()
        seconds, self._reported_s = now - self._reported_s, now
        return {
            "rollout/spec_accept_rate": Ratio(accepted, new["nodes"]),
            "budget/nodes_per_pass": Ratio(new["nodes"], new["passes"]),
            "rollout/passes": int(new["passes"]),
            "spec/draft_hit_rate": Ratio(new["hits"], new["asks"]),
            "spec/bad_drafts": int(new["bad_drafts"]),
            "spec/draft_time_frac": Ratio(new["draft_s"], seconds),
        }
