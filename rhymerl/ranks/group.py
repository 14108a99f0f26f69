"""The ranks of torch.distributed."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from rhymerl.ranks.base import Line, Lockstep, Ranks
from rhymerl.ranks.gradients import sum_gradients
from rhymerl.ranks.lifeline import Lifeline
from rhymerl.ranks.mail import Mail

if TYPE_CHECKING:
    from torch import nn

T = TypeVar("T")

_PATIENCE = timedelta(days=7)  # a rank that is slow is waited for; one that has ended is known otherwise
_EXPLAIN_S = 5.0


class Group(Ranks):
    """All processes of the default group, which has been initialised.

    What is gathered and broadcast goes over a gloo group of its own; gradients go over the default group, on their device.
    """

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self._meetings = dist.new_group(backend="gloo", timeout=_PATIENCE)
        self._lifeline: Lifeline | None = None
        host = os.environ.get("MASTER_ADDR", "localhost")
        self._lifeline = Lifeline(self.rank, self.size, exchange=self.broadcast, host=host)
        # Private, but the default group's store has no other name.
        self._store = PrefixStore(f"rhymerl/{self.broadcast(uuid.uuid4().hex)}", _get_default_store())
        self._num_lines = 0

    def gather(self, value: T) -> list[T]:
        found: list[T | None] = [None] * self.size
        with self._meeting():
            dist.all_gather_object(found, value, group=self._meetings)
        return found  # type: ignore[return-value]

    def broadcast(self, value: T) -> T:
        values = [value if self.rank == 0 else None]
        with self._meeting():
            dist.broadcast_object_list(values, src=0, group=self._meetings)
        return values[0]  # type: ignore[return-value]

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        with self._meeting():
            sum_gradients(parameters)

    def line(self, *, lockstep: bool) -> Line:
        self._num_lines += 1
        if lockstep:
            return Lockstep(self)
        name = f"line/{self._num_lines}"
        return Mail(self._store, name, rank=self.rank, size=self.size, meeting=self._meeting)

    def check(self) -> None:
        if self._lifeline is not None:
            self._lifeline.check()

    def fail(self, reason: str) -> None:
        if self._lifeline is not None:
            self._lifeline.fail(reason)

    def close(self) -> None:
        if self._lifeline is not None:
            self._lifeline.close()
        self._lifeline = None

    @contextmanager
    def _meeting(self) -> Iterator[None]:
        """Whoever has ended is told of, also as the reason for a connection that breaks within."""
        self.check()
        try:
            yield
        except RuntimeError:
            if self._lifeline is not None:
                self._lifeline.check(wait_s=_EXPLAIN_S)
            raise
