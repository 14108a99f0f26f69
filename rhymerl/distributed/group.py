"""The ranks of torch.distributed."""

from __future__ import annotations

import hmac
import os
import secrets
import signal
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import FrameType
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from rhymerl.distributed.base import Channel, LockstepChannel, Message, Ranks
from rhymerl.distributed.failure_detector import FailureDetector
from rhymerl.distributed.parent import have_met
from rhymerl.distributed.secret import VARIABLE, shared_secret
from rhymerl.distributed.store_channel import StoreChannel
from rhymerl.distributed.wire import Wire
from rhymerl.errors import RunError
from rhymerl.types import Ratio

T = TypeVar("T")

_PATIENCE = timedelta(days=7)  # a rank that is slow is waited for; one that has ended is known otherwise
_EXPLAIN_S = 5.0
_NONCE_BYTES = 16


class Group(Ranks):
    """All processes of the default group, which has been initialised.

    What is gathered and broadcast goes over a gloo group of its own; gradients go over the default group, on their
    device. Values travel signed and as plain data, numpy arrays and these `records`. While they work, and until
    `close`, SIGTERM ends all ranks. Raises ConfigError or RunError when they have no secret in common.
    """

    def __init__(self, records: Iterable[type] = ()) -> None:
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self._collectives = dist.new_group(backend="gloo", timeout=_PATIENCE)
        self._num_collectives = 0
        self._failure_detector: FailureDetector | None = None
        key = self._key_of_run()
        self._wire = Wire([Message, Ratio, *records], key=key)
        host = os.environ.get("MASTER_ADDR", "localhost")
        self._failure_detector = FailureDetector(self.rank, self.size, exchange=self.broadcast, host=host)
        # Private, but the default group's store has no other name.
        self._store = PrefixStore(f"rhymerl/{self.broadcast(secrets.token_hex(16))}", _get_default_store())
        self._num_channels = 0
        have_met()
        self._before: Any = None  # what SIGTERM did

    def _key_of_run(self) -> bytes:
        """Derive a key from the secret and a nonce of each rank: no message of another run is good in this one."""
        secret = shared_secret()
        mine = secrets.token_bytes(_NONCE_BYTES)
        nonces = self._send_around(mine)
        key = hmac.digest(secret, b"".join(nonces), "sha256")
        proofs = self._send_around(hmac.digest(key, bytes([0]) + nonces[self.rank], "sha256"))
        for rank, (nonce, proof) in enumerate(zip(nonces, proofs, strict=True)):
            if not hmac.compare_digest(proof, hmac.digest(key, bytes([0]) + nonce, "sha256")):
                raise RunError(
                    f"rank {rank} has another secret than rank {self.rank}: set {VARIABLE} to the same for all ranks, "
                    "or give them the same home directory"
                )
        return key

    def _send_around(self, mine: bytes) -> list[bytes]:
        """Return every rank's bytes, of any lengths, on every rank."""
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        with self._collective():
            dist.all_gather(sizes, torch.tensor([len(mine)]), group=self._collectives)
            found = [
                _tensor(mine) if r == self.rank else torch.empty(int(n), dtype=torch.uint8) for r, n in enumerate(sizes)
            ]
            for rank, content in enumerate(found):  # not all at once, which would pad each to the longest
                dist.broadcast(content, src=rank, group=self._collectives)
        return [mine if rank == self.rank else content.numpy().tobytes() for rank, content in enumerate(found)]

    def _address(self, rank: int) -> str:
        """Return the address of what that rank says in the current collective."""
        return f"collective/{self._num_collectives}/{rank}"

    def gather(self, value: T) -> list[T]:
        self._num_collectives += 1
        found = self._send_around(self._wire.pack(value, address=self._address(self.rank)))
        return [
            value if rank == self.rank else self._wire.unpack(message, address=self._address(rank))
            for rank, message in enumerate(found)
        ]

    def broadcast(self, value: T) -> T:
        self._num_collectives += 1
        mine = self._wire.pack(value, address=self._address(0)) if self.rank == 0 else b""
        size = torch.tensor([len(mine)])
        with self._collective():
            dist.broadcast(size, src=0, group=self._collectives)
            content = _tensor(mine) if self.rank == 0 else torch.empty(int(size), dtype=torch.uint8)
            dist.broadcast(content, src=0, group=self._collectives)
        return value if self.rank == 0 else self._wire.unpack(content.numpy().data, address=self._address(0))

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        with self._collective():
            sum_gradients(parameters)

    def channel(self, *, lockstep: bool) -> Channel:
        self._own_sigterm()
        self._num_channels += 1
        if lockstep:
            return LockstepChannel(self)
        name = f"channel/{self._num_channels}"
        return StoreChannel(
            self._store, name, wire=self._wire, rank=self.rank, size=self.size, collective=self._collective
        )

    def check(self) -> None:
        if self._failure_detector is not None:
            self._failure_detector.check()

    def explain(self, error: BaseException) -> None:
        if self._failure_detector is None or not isinstance(error, RuntimeError) or isinstance(error, RunError):
            return
        try:
            self._failure_detector.check(wait_s=_EXPLAIN_S)
        except RunError as reason:
            error.add_note(f"error: {reason}")

    def fail(self, reason: str) -> None:
        if self._failure_detector is not None:
            self._failure_detector.fail(reason)

    def _own_sigterm(self) -> None:
        """Take SIGTERM once the work begins, since Lightning takes it when a stage does; a program's handler stays."""
        is_main = threading.current_thread() is threading.main_thread()
        now = signal.getsignal(signal.SIGTERM)
        if is_main and (now in (None, signal.SIG_DFL) or type(now).__module__.startswith("lightning.")):
            self._before = signal.signal(signal.SIGTERM, self._on_sigterm)

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        """End all ranks when one gets SIGTERM: Lightning would wait for a collective that the others never reach."""
        self.fail("it was told to end (SIGTERM)")
        raise SystemExit(128 + number)

    def close(self) -> None:
        if signal.getsignal(signal.SIGTERM) == self._on_sigterm:  # else Lightning has given the signal back already
            # None: what was there before was not Python's.
            signal.signal(signal.SIGTERM, self._before if self._before is not None else signal.SIG_DFL)
        self._before = None
        if self._failure_detector is not None:
            self._failure_detector.close()
        self._failure_detector = None

    @contextmanager
    def _collective(self) -> Iterator[None]:
        """Context of a collective: a rank that has ended is an error, also when a connection breaks within."""
        self.check()
        try:
            yield
        except RuntimeError:
            if self._failure_detector is not None:
                self._failure_detector.check(wait_s=_EXPLAIN_S)
            raise


def _tensor(content: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(bytearray(content), np.uint8))


def sum_gradients(parameters: Sequence[nn.Parameter], *, bucket_bytes: int = 25 * 2**20) -> None:
    """Add up each parameter's gradient over all ranks, in place. Every rank gives the same parameters.

    Where a rank has no gradient it adds zeros; where none has one it stays None, so that the optimizer skips that
    parameter as it would on one rank. At most two buckets are held at a time, each of `bucket_bytes` or one parameter.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    sent: _Bucket | None = None
    for chosen in buckets(trained, bucket_bytes):
        following = _Bucket(chosen)
        if sent is not None:
            sent.receive()
        sent = following
    if sent is not None:
        sent.receive()


def buckets(parameters: Sequence[nn.Parameter], bucket_bytes: int) -> Iterator[list[nn.Parameter]]:
    """Yield parameters of one dtype and device, in order, as many as stay within `bucket_bytes` (one always does)."""
    kinds: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
    for parameter in parameters:
        kinds.setdefault((parameter.dtype, parameter.device), []).append(parameter)
    for kind in kinds.values():
        current: list[nn.Parameter] = []
        size = 0
        for parameter in kind:
            if current and size + parameter.nbytes > bucket_bytes:
                yield current
                current, size = [], 0
            current.append(parameter)
            size += parameter.nbytes
        yield current


class _Bucket:
    """Gradients on their way, as one flat tensor; behind them stands, for each, how many ranks have it."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        held = [parameter.grad is not None for parameter in parameters]
        flat = [each.new_zeros(each.numel()) if each.grad is None else each.grad.flatten() for each in parameters]
        self._flat = torch.cat([*flat, parameters[0].new_tensor(held)])
        self._work = dist.all_reduce(self._flat, async_op=True)

    def receive(self) -> None:
        """Wait for the sums and put them where the gradients are."""
        self._work.wait()
        sizes = [parameter.numel() for parameter in self._parameters]
        *sums, counts = self._flat.split([*sizes, len(sizes)])
        for parameter, total, count in zip(self._parameters, sums, counts.tolist(), strict=True):
            if count:
                if parameter.grad is None:
                    parameter.grad = torch.empty_like(parameter)
                parameter.grad.copy_(total.view_as(parameter))
