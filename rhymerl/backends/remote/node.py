"""The place of this rank on its node: every rank has its own engine, and engines of one node share its devices."""

from __future__ import annotations

import socket
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePosition:
    """This process is `rank` of `num_ranks`, of which `num_here` are on its node."""

    rank: int = 0
    num_ranks: int = 1
    num_here: int = 1

    @classmethod
    def of_this_process(cls) -> NodePosition:
        """Return this process's position in torch's default group, if there is one.

        All of its ranks have to call this then: they exchange host names through its store, without a collective.
        """
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return cls()
        rank, size = dist.get_rank(), dist.get_world_size()
        # Private, but the default group's store has no other name. A collective would need a tensor on each rank's
        # device.
        store, node = PrefixStore("rhymerl/engines", _get_default_store()), socket.gethostname()
        store.set(str(rank), node)
        nodes = [store.get(str(each)).decode() for each in range(size)]
        return cls(rank=rank, num_ranks=size, num_here=nodes.count(node))
