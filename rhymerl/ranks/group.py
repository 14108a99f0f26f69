"""The ranks of torch.distributed."""

from __future__ import annotations

import os
import pickle
import signal
import threading
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
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
    While they work, and until `close`, SIGTERM ends all ranks.
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
        self._before: Any = None  # what SIGTERM did

    def gather(self, value: T) -> list[T]:
        mine = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        with self._meeting():
            dist.all_gather(sizes, torch.tensor([len(mine)]), group=self._meetings)
            found = [
                mine if rank == self.rank else torch.empty(int(n), dtype=torch.uint8) for rank, n in enumerate(sizes)
            ]
            for rank, content in enumerate(found):  # not all at once, which would pad each to the longest
                dist.broadcast(content, src=rank, group=self._meetings)
        return [value if rank == self.rank else pickle.loads(bytes(found[rank].numpy())) for rank in range(self.size)]

    def broadcast(self, value: T) -> T:
        values = [value if self.rank == 0 else None]
        with self._meeting():
            dist.broadcast_object_list(values, src=0, group=self._meetings)
        return values[0]  # type: ignore[return-value]

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        with self._meeting():
            sum_gradients(parameters)

    def line(self, *, lockstep: bool) -> Line:
        self._own_sigterm()
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

    def _own_sigterm(self) -> None:
        """Not before the work begins: Lightning takes the signal when a stage does. A program's own handler keeps it."""
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and _is_default_or_lightnings(signal.getsignal(signal.SIGTERM)):
            self._before = signal.signal(signal.SIGTERM, self._on_sigterm)

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        """One rank that is told to end ends all; Lightning's own way waits for a meeting, which the others never come to."""
        self.fail("it was told to end (SIGTERM)")
        raise SystemExit(128 + number)

    def close(self) -> None:
        if signal.getsignal(signal.SIGTERM) == self._on_sigterm:  # else Lightning has given the signal back already
            # None: what was there before was not Python's.
            signal.signal(signal.SIGTERM, self._before if self._before is not None else signal.SIG_DFL)
        self._before = None
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


def _is_default_or_lightnings(handler: object) -> bool:
    return handler in (None, signal.SIG_DFL) or type(handler).__module__.startswith("lightning.")
