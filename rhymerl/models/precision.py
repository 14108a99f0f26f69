"""A model computed in more bits than it has: proofs are about what is computed, not about how it is rounded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rhymerl.models.sharding import is_sharded


@contextmanager
def computing_in(dtype: torch.dtype, model: nn.Module) -> Iterator[None]:
    """Context in which the forwards of `model` compute in `dtype`, float32 or float64, if its weights have fewer bits.

    Matrix products keep all of float32's bits. A layer's weights are converted while it runs and no longer, so that the
    whole model never exists twice; all of them, since some layers read the weights of their parts. A wider model stays
    as it is, and so does one that is sharded.
    """
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    with ExitStack() as stack, torch.autocast(_device_type(model), enabled=False):
        stack.callback(torch.set_float32_matmul_precision, precision)
        if not any(map(is_sharded, model.modules())):  # a decoder is sharded by its layers
            for module, parts in _layers_of(model):
                _convert_while_it_runs(module, parts, dtype, stack)
        yield


def _layers_of(module: nn.Module) -> Iterator[tuple[nn.Module, list[nn.Module]]]:
    """Yield layers with all of their modules, and what is in none with itself."""
    yield module, [module]
    for child in module.children():
        if isinstance(module, nn.ModuleList):
            yield child, list(child.modules())
        else:
            yield from _layers_of(child)


def _convert_while_it_runs(module: nn.Module, parts: list[nn.Module], dtype: torch.dtype, stack: ExitStack) -> None:
    tensors: list[dict[str, Any]] = [kept for part in parts for kept in (part._parameters, part._buffers)]
    own = [(kept, name, each) for kept in tensors for name, each in kept.items() if _has_fewer_bits(each, dtype)]
    if not own:
        return

    def widen(*_: Any) -> None:
        for kept, name, each in own:
            kept[name] = each.detach().to(dtype)

    def restore(*_: Any) -> None:
        for kept, name, each in own:
            kept[name] = each

    stack.callback(module.register_forward_pre_hook(widen, prepend=True).remove)
    stack.callback(module.register_forward_hook(restore, always_call=True).remove)
    stack.callback(restore)  # an exception may come before the hook does


def _has_fewer_bits(tensor: Tensor | None, dtype: torch.dtype) -> bool:
    return tensor is not None and tensor.is_floating_point() and tensor.dtype.itemsize < dtype.itemsize


def _device_type(model: nn.Module) -> str:
    return next((each.device.type for each in model.parameters()), "cpu")
