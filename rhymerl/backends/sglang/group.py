"""New weights over a process group of the trainer and its engines' ranks: no disk between them, on one node or several."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, _new_process_group_helper, _world

from rhymerl.backends.sglang.fleet import Fleet
from rhymerl.backends.sglang.weights import buckets, update_session
from rhymerl.errors import BackendError

_NAME = "rhymerl_weights"
_JOIN_S = 120.0
_PARTING_S = 10.0


class WeightGroup:
    """The trainer is rank 0; the others are the engines' ranks, `ranks` of each. Joined when it is made, until `close`.

    Every rank of the trainer makes one with its own engines; the trainer's own groups have nothing to do with it. NCCL for
    engines on GPUs, gloo for those on a CPU. Raises BackendError when an engine refuses.
    """

    def __init__(self, fleet: Fleet, *, ranks: int, device: torch.device) -> None:
        self.fleet = fleet
        self.device = device
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="rhymerl-weights")
        address, timeout = _own_address([engine.host for engine in fleet.engines]), timedelta(seconds=_JOIN_S)
        size = 1 + ranks * len(fleet.engines)
        # Not by torch's rendezvous: under torchrun that looks for a store of the launcher's at whatever address it is given.
        store = TCPStore(address, 0, size, is_master=True, timeout=timeout, wait_for_workers=False)
        backend = "nccl" if device.type == "cuda" else "gloo"
        content = {
            "master_address": address,
            "master_port": store.port,
            "world_size": size,
            "group_name": _NAME,
            "backend": backend,
        }
        contents = [{**content, "rank_offset": offset} for offset in range(1, size, ranks)]
        self._group = self._meanwhile(
            "/init_weights_update_group", contents, lambda: _joined(backend, store, size, timeout)
        )

    def send(self, named: Iterable[tuple[str, Tensor]], dtype: torch.dtype, *, version: int) -> None:
        """All of them, a bucket at a time."""
        with update_session(self.fleet):
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

        contents = [content] * len(self.fleet.engines)
        self._meanwhile("/update_weights_from_distributed", contents, broadcast)

    def _meanwhile(self, path: str, contents: Sequence[Mapping[str, Any]], here: Callable[[], Any]) -> Any:
        """What `here` returns, while the engines do their part; a refusal comes first."""
        there = self._threads.submit(self.fleet.post_each, path, contents)
        result = here()
        there.result()
        return result

    def close(self) -> None:
        """All leave the group; engines may have gone."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        content = {"group_name": _NAME}
        with suppress(BackendError):
            self.fleet.each(
                lambda _, engine: engine.post("/destroy_weights_update_group", content, timeout_s=_PARTING_S)
            )
        if self._group in _world.pg_map:  # it goes with the default group, where that has been destroyed before
            dist.destroy_process_group(self._group)


def _joined(backend: str, store: TCPStore, size: int, timeout: timedelta) -> Any:
    """A group besides the default one, made as SGLang makes its side of it."""
    group, _ = _new_process_group_helper(
        size, 0, [], dist.Backend(backend), PrefixStore(_NAME, store), group_name=cast(Any, _NAME), timeout=timeout
    )
    _world.pg_group_ranks[group] = {each: each for each in range(size)}
    return group


def _own_address(hosts: Sequence[str]) -> str:
    """Of this machine, as all `hosts` see it: not that of its loopback where one of them is another machine."""
    addresses = [_seen_from(host) for host in hosts]
    return next((address for address in addresses if not address.startswith("127.")), addresses[0])


def _seen_from(host: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends nothing
        return str(probe.getsockname()[0])
