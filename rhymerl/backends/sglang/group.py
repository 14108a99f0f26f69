"""New weights over a process group of the trainer and an engine's ranks: no disk between them, on one node or two."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, _new_process_group_helper, _world
from torch.distributed.rendezvous import rendezvous

from rhymerl.backends.sglang.client import Client
from rhymerl.backends.sglang.server import free_port
from rhymerl.backends.sglang.weights import buckets, update_session
from rhymerl.errors import BackendError

_NAME = "rhymerl_weights"
_JOIN_S = 120.0


class WeightGroup:
    """The trainer is rank 0; the `ranks` of the engine behind `client` are the others. Joined when it is made, until `close`.

    NCCL for an engine on GPUs, gloo for one on a CPU. Raises BackendError when the engine refuses.
    """

    def __init__(self, client: Client, *, ranks: int, device: torch.device) -> None:
        self.client = client
        self.device = device
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="rhymerl-weights")
        address, port = _own_address(client.host), free_port()
        backend = "nccl" if device.type == "cuda" else "gloo"
        content = {
            "master_address": address,
            "master_port": port,
            "rank_offset": 1,
            "world_size": 1 + ranks,
            "group_name": _NAME,
            "backend": backend,
        }
        self._group = self._meanwhile(
            "/init_weights_update_group", content, lambda: _joined(backend, address, port, 1 + ranks)
        )

    def send(self, named: Iterable[tuple[str, Tensor]], dtype: torch.dtype, *, version: int) -> None:
        """All of them, a bucket at a time."""
        with update_session(self.client):
            for bucket in buckets(named, dtype):
                self._send(bucket, dtype, version)

    def _send(self, bucket: Sequence[tuple[str, Tensor]], dtype: torch.dtype, version: int) -> None:
        content = {
            "names": [name for name, _ in bucket],
            "dtypes": [str(dtype).removeprefix("torch.")] * len(bucket),
            "shapes": [list(tensor.shape) for _, tensor in bucket],
            "group_name": _NAME,
            "weight_version": str(version),
            "flush_cache": False,
        }
        options = dist.BroadcastOptions()
        options.rootRank = 0
        tensors = [tensor.to(self.device).contiguous() for _, tensor in bucket]

        def broadcast() -> None:
            for tensor in tensors:
                self._group.broadcast([tensor], options).wait()

        self._meanwhile("/update_weights_from_distributed", content, broadcast)

    def _meanwhile(self, path: str, content: dict[str, Any], here: Callable[[], Any]) -> Any:
        """What `here` returns, while the engine does its part; its refusal comes first."""
        there = self._threads.submit(self.client.post, path, content)
        result = here()
        there.result()
        return result

    def close(self) -> None:
        """Both leave the group; the engine may have gone."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        with suppress(BackendError):
            self.client.post("/destroy_weights_update_group", {"group_name": _NAME})
        dist.destroy_process_group(self._group)


def _joined(backend: str, address: str, port: int, size: int) -> Any:
    """A group besides the default one, made as SGLang makes its side of it."""
    timeout = timedelta(seconds=_JOIN_S)
    store, rank, size = next(rendezvous(f"tcp://{address}:{port}", 0, size, timeout=timeout))
    store.set_timeout(timeout)
    group, _ = _new_process_group_helper(
        size, rank, [], dist.Backend(backend), PrefixStore(_NAME, store), group_name=cast(Any, _NAME), timeout=timeout
    )
    _world.pg_group_ranks[group] = {each: each for each in range(size)}
    return group


def _own_address(host: str) -> str:
    """Of this machine, as `host` sees it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends nothing
        return str(probe.getsockname()[0])
