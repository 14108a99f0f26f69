"""Moments in the host's memory: they are on the device while the optimizer steps, and at no other time."""

from __future__ import annotations

from collections.abc import Callable
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

    def bring(each: Optimizer, *rest: Any) -> None:
        _move(each, lambda parameter: parameter.device)

    def take(each: Optimizer, *rest: Any) -> None:
        _move(each, lambda parameter: HOST)

    optimizer.register_step_pre_hook(bring)
    optimizer.register_step_post_hook(take)
    take(optimizer)


def _move(optimizer: Optimizer, place_of: Callable[[Tensor], torch.device]) -> None:
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                state[name] = value.to(place_of(parameter))
