"""Ranks as threads of one process: they wait at a barrier, and messages go through a store in memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist

from rhymerl.distributed.base import Channel, LockstepChannel, Message, Ranks
from rhymerl.distributed.store_channel import StoreChannel
from rhymerl.distributed.wire import Wire
from rhymerl.rollout import RECORDS
from rhymerl.types import Ratio

T = TypeVar("T")
_WAIT_S = 600
WIRE = Wire([Message, Ratio, *RECORDS], key=b"of the tests alone")


class Threads(Ranks):
    """One of several; what they share is made by `run_ranks`."""

    def __init__(self, rank: int, barrier: threading.Barrier, table: list[Any], store: dist.HashStore) -> None:
        self.rank, self.size = rank, len(table)
        self._barrier, self._table, self._store = barrier, table, store
        self._num_channels = 0

    def gather(self, value: T) -> list[T]:
        """Return what others give as they would send it."""
        messages = self._gather(WIRE.pack(value, address="collective"))
        return [
            value if rank == self.rank else WIRE.unpack(message, address="collective")
            for rank, message in enumerate(messages)
        ]

    def _gather(self, value: T) -> list[T]:
        self._table[self.rank] = value
        self._barrier.wait(_WAIT_S)
        values = list(self._table)
        self._barrier.wait(_WAIT_S)
        return values

    def broadcast(self, value: T) -> T:
        return self.gather(value)[0]

    def sum_gradients(self, parameters):
        parts = self._gather([None if p.grad is None else p.grad.clone() for p in parameters])
        for parameter, *gradients in zip(parameters, *parts, strict=True):
            held = [gradient for gradient in gradients if gradient is not None]
            parameter.grad = sum(held) if held else None

    def channel(self, *, lockstep: bool) -> Channel:
        self._num_channels += 1
        if lockstep:
            return LockstepChannel(self)
        return StoreChannel(
            self._store,
            f"channel/{self._num_channels}",
            wire=WIRE,
            rank=self.rank,
            size=self.size,
            collective=self._collective,
        )

    @contextmanager
    def _collective(self) -> Iterator[None]:
        if self._barrier.broken:
            raise threading.BrokenBarrierError
        yield

    def fail(self, reason: str) -> None:
        self._barrier.abort()


def run_ranks(size: int, work: Callable[[Threads], T]) -> list[T]:
    """`work` on each rank, by rank. Raises what the first one to fail has raised; the others do not wait for it."""
    barrier, table, store = threading.Barrier(size), [None] * size, dist.HashStore()
    ranks = [Threads(rank, barrier, table, store) for rank in range(size)]
    errors: list[Exception] = []

    def guarded(rank: Threads) -> T:
        try:
            return work(rank)
        except Exception as error:
            errors.append(error)
            rank.fail(str(error))
            raise

    with ThreadPoolExecutor(size) as pool:
        done = [pool.submit(guarded, rank) for rank in ranks]
        for each in done:
            each.exception()
    if errors:
        raise errors[0]
    return [each.result() for each in done]
