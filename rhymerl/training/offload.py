"""Moments in the host's memory: they are on the device while the optimizer steps, and at no other time."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

HOST = torch.device("cpu")


def offload(optimizer: Optimizer) -> None:
    """Keep any optimizer's state in the host's memory; its steps are the same to the last bit.

    A checkpoint's state goes there at once. Anything smaller than a parameter, such as the number of steps, stays on
    the device.
    """
    optimizer.register_step_pre_hook(partial(_move, None))
    optimizer.register_step_post_hook(partial(_move, HOST))
    _move(HOST, optimizer)


def _move(place: torch.device | None, optimizer: Optimizer, *rest: Any) -> None:
    """Move an optimizer's state to a place; None: to each parameter's own."""
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                state[name] = value.to(place or parameter.device)
