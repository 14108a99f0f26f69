"""A model computed in more bits than it has: proofs are about what is computed, not about how it is rounded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

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
    device = next((each.device.type for each in model.parameters()), "cpu")
    with ExitStack() as stack, torch.autocast(device, enabled=False):
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
    there = [(kept, name, each) for kept in tensors for name, each in kept.items() if each is not None]
    own = [each for each in there if each[2].is_floating_point() and each[2].dtype.itemsize < dtype.itemsize]
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
