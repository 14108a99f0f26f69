"""A model of 16 bits computed in 32: proofs are about what is computed, not about how it is rounded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rhymerl.models.sharding import is_sharded

_SHORT = (torch.bfloat16, torch.float16)


@contextmanager
def in_float32(model: nn.Module) -> Iterator[None]:
    """Context in which the forwards of `model` compute in float32 what has 16 bits, and products keep all of float32's bits.

    A module's weights are converted while it runs and no longer, so that the whole model never exists twice. A wider model stays as it is,
    and so does one that is sharded.
    """
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    with ExitStack() as stack, torch.autocast(_device_type(model), enabled=False):
        stack.callback(torch.set_float32_matmul_precision, precision)
        modules = list(model.modules())
        for module in modules if not any(map(is_sharded, modules)) else ():  # a decoder is sharded by its layers
            _convert_while_it_runs(module, stack)
        yield


def _convert_while_it_runs(module: nn.Module, stack: ExitStack) -> None:
    tensors: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
    own = [(kept, name, each) for kept in tensors for name, each in kept.items() if _is_short(each)]
    if not own:
        return

    def widen(*_: Any) -> None:
        for kept, name, each in own:
            kept[name] = each.detach().float()

    def restore(*_: Any) -> None:
        for kept, name, each in own:
            kept[name] = each

    stack.callback(module.register_forward_pre_hook(widen, prepend=True).remove)
    stack.callback(module.register_forward_hook(restore, always_call=True).remove)
    stack.callback(restore)  # an exception may come before the hook does


def _is_short(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.dtype in _SHORT


def _device_type(model: nn.Module) -> str:
    return next((each.device.type for each in model.parameters()), "cpu")
