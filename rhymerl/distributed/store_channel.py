"""A channel through the process group's key-value store: no rank waits for another that still works."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from rhymerl.distributed.base import Channel, Decide, Message, Received
from rhymerl.distributed.wire import Wire

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

_WAIT_S = 0.05
_POLL_S = 0.005


class MessageQueue:
    """Values under the numbered keys of a store, read in order by each of its readers."""

    def __init__(self, store: Store, name: str, wire: Wire) -> None:
        self._store = store
        self._wire = wire
        self._name = name
        self._num_read = 0

    def put(self, value: Any) -> None:
        """Put a value behind what anybody has put in before."""
        number = self._store.add(f"{self._name}/count", 1) - 1
        key = f"{self._name}/{number}"
        self._store.set(key, self._wire.pack(value, address=key))  # type: ignore[arg-type]

    def take(self) -> list[Any]:
        """Return what is new to this reader."""
        values = []
        while self._store.check([self._next]):
            values.append(self._wire.unpack(self._store.get(self._next), address=self._next))
            self._num_read += 1
        return values

    def wait(self) -> None:
        """Wait until there is something new, or a moment has passed.

        A store's own wait warns whenever its moment has passed.
        """
        until = time.monotonic() + _WAIT_S
        while not self._store.check([self._next]) and time.monotonic() < until:
            time.sleep(_POLL_S)

    def clear(self) -> None:
        """Free what this reader has read; of all its readers one does."""
        for number in range(self._num_read):
            self._store.delete_key(f"{self._name}/{number}")
        self._store.delete_key(f"{self._name}/count")

    @property
    def _next(self) -> str:
        return f"{self._name}/{self._num_read}"


class StoreChannel(Channel):
    """Queues for reports to rank 0, its commands, and each rank's messages; exchanges enter `collective`."""

    def __init__(
        self,
        store: Store,
        name: str,
        *,
        wire: Wire,
        rank: int,
        size: int,
        collective: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._rank = rank
        self._collective = collective
        self._reports = MessageQueue(store, f"{name}/reports", wire)
        self._commands = MessageQueue(store, f"{name}/commands", wire)
        self._messages = [MessageQueue(store, f"{name}/messages/{to}", wire) for to in range(size)]

    def exchange(self, report: Any, messages: Sequence[Message], decide: Decide, *, waits: bool) -> Received:
        with self._collective():
            for message in messages:
                self._messages[message.to].put(message.value)
            if report is not None:
                self._reports.put((self._rank, report))
            if waits:
                (self._reports if self._rank == 0 else self._commands).wait()
            command = decide(self._reports.take()) if self._rank == 0 else None
            if command is not None:
                self._commands.put(command)
            return Received(commands=self._commands.take(), messages=self._messages[self._rank].take())

    def close(self) -> None:
        with self._collective():
            self._messages[self._rank].clear()
            if self._rank == 0:
                self._reports.clear()
                self._commands.clear()
