"""The fake engine in a process of its own, with SGLang's side of a group for weights."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _new_process_group_helper, _world
from torch.distributed.rendezvous import rendezvous

from rhymerl.backends.remote.client import Client
from tests.backends.sglang.fake_engine import FakeEngine
from tests.integration.programs import CONTEXT

_TIMEOUT = timedelta(hours=10)


class WeightsEngine(FakeEngine):
    """Reports each tensor's sum at /sums; /refuse names one path to refuse, /strike one that gets a signal."""

    def __init__(self) -> None:
        super().__init__()
        self.groups: dict[str, Any] = {}
        self.sums: dict[str, float] = {}
        self.struck: dict[str, signal.Signals] = {}  # by path

    def answer(self, path: str, content: dict[str, Any]) -> tuple[int, Any] | None:
        if path in self.struck:
            os.kill(os.getpid(), self.struck[path])
        return super().answer(path, content)

    def on_refuse(self, content: dict[str, Any]) -> tuple[int, Any]:
        refusal = 400, {"success": False, "message": "not with me"}
        self.answers = {} if content["path"] is None else {content["path"]: refusal}
        return 200, ""

    def on_strike(self, content: dict[str, Any]) -> tuple[int, Any]:
        self.struck[content["path"]] = signal.Signals[content["signal"]]
        return 200, ""

    def on_pid(self, content: dict[str, Any]) -> tuple[int, Any]:
        return 200, os.getpid()

    def on_init_weights_update_group(self, content: dict[str, Any]) -> tuple[int, Any]:
        """Join the group as `init_custom_process_group` of SGLang does."""
        name, rank, size = content["group_name"], content["rank_offset"], content["world_size"]
        address = f"tcp://{content['master_address']}:{content['master_port']}"
        store, rank, size = next(rendezvous(address, rank, size, timeout=_TIMEOUT))
        store = PrefixStore(name, store)
        backend = dist.Backend(content["backend"])
        group, _ = _new_process_group_helper(size, rank, [], backend, store, group_name=name, timeout=_TIMEOUT)
        _world.pg_group_ranks[group] = {each: each for each in range(size)}
        self.groups[name] = group
        return 200, {"success": True, "message": ""}

    def on_update_weights_from_distributed(self, content: dict[str, Any]) -> tuple[int, Any]:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        for name, dtype, shape in zip(content["names"], content["dtypes"], content["shapes"], strict=True):
            tensor = torch.empty(shape, dtype=getattr(torch, dtype))
            self.groups[content["group_name"]].broadcast([tensor], options).wait()
            self.sums[name] = float(tensor.double().sum())
        self.version = content["weight_version"]
        return 200, {"success": True, "message": ""}

    def on_destroy_weights_update_group(self, content: dict[str, Any]) -> tuple[int, Any]:
        dist.destroy_process_group(self.groups.pop(content["group_name"]))
        return 200, {"success": True, "message": ""}

    def on_sums(self, content: dict[str, Any]) -> tuple[int, Any]:
        return 200, self.sums


def _serve(pipe: Connection[Any, Any]) -> None:
    with WeightsEngine() as engine, suppress(EOFError):
        pipe.send(engine.url)
        pipe.recv()


@contextmanager
def weights_engine() -> Iterator[Client]:
    """The way to one that runs."""
    ours, theirs = CONTEXT.Pipe()
    process = CONTEXT.Process(target=_serve, args=(theirs,))
    process.start()
    try:
        yield Client.at(ours.recv())
    finally:
        with suppress(BrokenPipeError):  # it is dead
            ours.send("end")
        process.join()
