"""A line through the process group's key-value store: no rank waits for another that still works."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from rhymerl.distributed.base import Decide, Line, News, Parcel
from rhymerl.distributed.wire import Wire

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

_WAIT_S = 0.05
_POLL_S = 0.005


class Box:
    """Values under the numbered keys of a store, read in order by each of its readers."""

    def __init__(self, store: Store, name: str, wire: Wire) -> None:
        self._store = store
        self._wire = wire
        self._name = name
        self._num_read = 0

    def put(self, value: Any) -> None:
        """Behind what anybody has put in before."""
        number = self._store.add(f"{self._name}/count", 1) - 1
        key = f"{self._name}/{number}"
        self._store.set(key, self._wire.pack(value, place=key))  # type: ignore[arg-type]

    def take(self) -> list[Any]:
        """What is new to this reader."""
        values = []
        while self._store.check([self._next]):
            values.append(self._wire.unpack(self._store.get(self._next), place=self._next))
            self._num_read += 1
        return values

    def wait(self) -> None:
        """Until there is something new, or a moment has passed. A store's own wait warns of every moment that has."""
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


class Mail(Line):
    """Boxes for reports to rank 0, for its orders, and for each rank's parcels; `meeting` is entered for every exchange."""

    def __init__(
        self,
        store: Store,
        name: str,
        *,
        wire: Wire,
        rank: int,
        size: int,
        meeting: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._rank = rank
        self._meeting = meeting
        self._reports = Box(store, f"{name}/reports", wire)
        self._orders = Box(store, f"{name}/orders", wire)
        self._parcels = [Box(store, f"{name}/parcels/{to}", wire) for to in range(size)]

    def exchange(self, report: Any, parcels: Sequence[Parcel], decide: Decide, *, waits: bool) -> News:
        with self._meeting():
            for parcel in parcels:
                self._parcels[parcel.to].put(parcel.value)
            if report is not None:
                self._reports.put((self._rank, report))
            if waits:
                (self._reports if self._rank == 0 else self._orders).wait()
            order = decide(self._reports.take()) if self._rank == 0 else None
            if order is not None:
                self._orders.put(order)
            return News(orders=self._orders.take(), parcels=self._parcels[self._rank].take())

    def close(self) -> None:
        self._parcels[self._rank].clear()
        if self._rank == 0:
            self._reports.clear()
            self._orders.clear()
