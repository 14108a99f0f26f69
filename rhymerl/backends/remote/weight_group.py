"""New weights over a process group of the trainer and its engine's ranks, on one or several nodes, without disk."""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from functools import partial
from threading import Lock, Thread
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import (
    PrefixStore,
    _abort_process_group,
    _new_process_group_helper,
    _world,
)

from rhymerl.backends.remote.client import Client, NoAnswerError
from rhymerl.backends.remote.weights import buckets, update_session
from rhymerl.errors import BackendError

_JOIN_S = 120.0  # for all to join, and for a bucket
_SETTLE_S = 1.0  # from the first failure: an engine may have the reason, and another may still be about to join
_PARTING_S = 10.0
_ERRORS = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_environment = Lock()


class WeightGroup:
    """The trainer is rank 0; the others are the engine's `ranks`. Joined when it is made, until `close`.

    Every rank of the trainer makes one with its own engine; the trainer's own groups have nothing to do with it. NCCL
    for an engine on GPUs, gloo for one on a CPU. Raises BackendError when the engine refuses, NoAnswerError when it is
    dead or says nothing for too long; the group is closed then.
    """

    def __init__(self, engine: Client, *, ranks: int, device: torch.device) -> None:
        self.engine = engine
        self.device = device
        self._group: Any = None
        self._has_failed = False
        self._timeout = timedelta(seconds=_JOIN_S)
        # The name is its own: the engine may still be in the group of a trainer that was killed.
        self._name = f"rhymerl_weights_{uuid.uuid4().hex}"
        address, size = _seen_from(engine.host), 1 + ranks
        # Not by torch's rendezvous: under torchrun that looks for a store of the launcher's at whatever address it is
        # given.
        self._rendezvous: TCPStore | None = TCPStore(
            address, 0, size, is_master=True, timeout=self._timeout, wait_for_workers=False
        )
        backend = "nccl" if device.type == "cuda" else "gloo"
        content = {
            "master_address": address,
            "master_port": self._rendezvous.port,
            "world_size": size,
            "group_name": self._name,
            "backend": backend,
            "rank_offset": 1,
        }
        self._joining: Future[None] = _in_background(partial(self._join, content))
        self._meanwhile("/init_weights_update_group", content, self._joining)

    def _join(self, content: Mapping[str, Any]) -> None:
        """Make a group beside the default one, as SGLang makes its side."""
        # A connection as the engine has its own: whoever waits at it fails as soon as the store is gone.
        address, port, size = content["master_address"], content["master_port"], content["world_size"]
        store = PrefixStore(self._name, TCPStore(address, port, size, timeout=self._timeout, wait_for_workers=False))
        backend, name = dist.Backend(content["backend"]), cast(Any, self._name)
        # For NCCL alone: gloo waits here until all have joined, and other servers' groups are made meanwhile.
        with _told_of_errors() if backend == "nccl" else nullcontext():
            group, _ = _new_process_group_helper(size, 0, [], backend, store, group_name=name, timeout=self._timeout)
        _world.pg_group_ranks[group] = {each: each for each in range(size)}
        self._group = group

    def send(self, named: Iterable[tuple[str, Tensor]], dtype: torch.dtype, *, version: int) -> None:
        with update_session(self.engine):
            for bucket in buckets(named, dtype):
                self._send(bucket, dtype, version)

    def _send(self, bucket: Sequence[tuple[str, Tensor]], dtype: torch.dtype, version: int) -> None:
        content = {
            "names": [name for name, _ in bucket],
            "dtypes": [str(dtype).removeprefix("torch.")] * len(bucket),
            "shapes": [list(tensor.shape) for _, tensor in bucket],
            "group_name": self._name,
            "weight_version": str(version),
            "flush_cache": False,
        }
        tensors = [tensor.to(self.device).contiguous() for _, tensor in bucket]
        on_gpu = self.device.type == "cuda"
        stream = torch.cuda.current_stream(self.device) if on_gpu else None  # the one that has made the tensors

        def broadcast() -> None:
            options = dist.BroadcastOptions()
            options.rootRank = 0
            with torch.cuda.stream(stream) if on_gpu else nullcontext():
                works = [self._group.broadcast([tensor], options) for tensor in tensors]
                for work in works:
                    work.wait(self._timeout)  # without one NCCL would only have the stream wait

        self._meanwhile("/update_weights_from_distributed", content, _in_background(broadcast))

    def _meanwhile(self, path: str, content: Mapping[str, Any], here: Future[None]) -> None:
        """Wait until `here` and the engine's part of it are done.

        A failure is raised, the engine's before that of `here`; then both leave the group.
        """
        there = _in_background(partial(self.engine.post, path, content))
        try:
            wait([here, there], return_when=FIRST_EXCEPTION)
            wait([here, there], _SETTLE_S)
            for side in filter(Future.done, [there, here]):
                side.result()
        except BaseException as error:
            self._has_failed = True
            self.close()
            if isinstance(error, RuntimeError):  # torch's
                kind = BackendError if there.done() else NoAnswerError
                raise kind(f"backend.weights='distributed': {error}") from error
            raise

    @property
    def is_closed(self) -> bool:
        """Return whether the group is closed, which it also is after a failure."""
        return self._rendezvous is None

    def close(self) -> None:
        """Leave the group with the engine, which may be gone. May be called twice."""
        if self._rendezvous is None:
            return
        self._rendezvous = None
        leaving = _in_background(self._leave)
        with suppress(BackendError):
            content = {"group_name": self._name}
            self.engine.post("/destroy_weights_update_group", content, timeout_s=_PARTING_S)
        wait([leaving], _PARTING_S)

    def _leave(self) -> None:
        """Leave at the same time as the engine.

        A group ends when nothing is under way in it, which may need that the engine has left.
        """
        wait([self._joining])
        group, self._group = self._group, None
        if group in _world.pg_map:  # it goes with the default group, where that has been destroyed before
            (_abort_process_group if self._has_failed else dist.destroy_process_group)(group)


def _in_background(action: Callable[[], Any]) -> Future[Any]:
    """Run `action` in a thread that the interpreter's end does not wait for."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(action())
        except BaseException as error:  # noqa: BLE001 - whoever waits gets it
            future.set_exception(error)

    Thread(target=run, name="rhymerl-weights", daemon=True).start()
    return future


@contextmanager
def _told_of_errors() -> Iterator[None]:
    """Context in which new groups abort at an NCCL error and leave it to the caller; others end the process.

    One thread at a time.
    """
    with _environment:
        before = os.environ.get(_ERRORS)
        os.environ[_ERRORS] = "2"
        try:
            yield
        finally:
            os.environ.pop(_ERRORS)
            if before is not None:
                os.environ[_ERRORS] = before


def _seen_from(host: str) -> str:
    """Return this machine's address as the engine's host sees it."""
    family, *_, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # sends nothing
        return str(probe.getsockname()[0])
