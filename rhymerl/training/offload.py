"""Moments in the host's memory: they are on the device while the optimizer steps, and at no other time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

HOST = torch.device("cpu")


def offload(optimizer: Optimizer) -> None:
    """Let the tensors that an optimizer keeps for its parameters live in the host's memory, whatever the optimizer; the steps are the same to the last bit.

    Those that a checkpoint has brought go there at once. What is smaller than a parameter, such as the number of steps,
    stays.
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
