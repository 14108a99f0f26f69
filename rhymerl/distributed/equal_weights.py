"""Ranks that begin with the same weights."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn
from torch.distributed.utils import _sync_module_states, _verify_param_shape_across_processes

_BUCKET_BYTES = 250 * 2**20  # DDP's own for this


def equal_weights(module: nn.Module) -> None:
    """Give every rank the first one's parameters and buffers, as DDP does when it is made; this is a collective.

    Raises RuntimeError on ranks whose parameters have other shapes than the first one's.
    """
    group = dist.group.WORLD
    assert group is not None, "the process group has been initialised"
    _verify_param_shape_across_processes(group, list(module.parameters()))
    _sync_module_states(module, group, _BUCKET_BYTES, src=0, params_and_buffers_to_ignore=())
