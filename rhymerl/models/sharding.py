"""Weights that are spread over ranks: each rank holds a part of every tensor, and a layer is whole while it is computed with.

torch's `fully_shard` (FSDP2) gathers the weights of a group before its forward and its backward, and spreads the sum of its gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from transformers import PreTrainedModel

from rhymerl.errors import ConfigError

T = TypeVar("T")
_METHOD = "rhymerl_call"


def shard(
    model: PreTrainedModel,
    mesh: DeviceMesh,
    *,
    compute_dtype: torch.dtype | None = None,
    fill: Callable[[nn.Module], None] | None = None,
) -> None:
    """Spread a language model, with or without its head, over the ranks of a mesh; all of them give the same weights.

    `fill` gives a group of weights its content, before its parts are all that stays. On a mesh of two dimensions only the second one shards. Weights are gathered in `compute_dtype` (None: in their own), and gradients
    of 16 bits are summed in float32. Raises ConfigError for a model whose layers are not known.
    """
    if not _layers(model):
        raise ConfigError(
            f"trainer.strategy=fsdp2: the layers of {type(model).__name__} are not known (_no_split_modules); expected ddp"
        )
    dtype = compute_dtype or model.dtype
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32 if dtype.itemsize < 4 else None)
    for group in gathered_together(model):
        if fill is not None:
            fill(group)
        fully_shard(group, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
        assert isinstance(group, FSDPModule)
        group.set_gradient_divide_factor(1.0)  # the update has divided its loss already
        group.set_force_sum_reduction_for_comms(True)
        setattr(group, _METHOD, _apply)
        register_fsdp_forward_method(group, _METHOD)


def gathered_together(model: PreTrainedModel) -> Iterator[nn.Module]:
    """Yield the modules whose weights are gathered together, inner ones first: layers, embeddings, and what is left."""
    yield from _layers(model)
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    is_tied = head is not None and head.weight is embeddings.weight
    if not is_tied:  # else they are one tensor, in the group of the model itself
        yield embeddings
        if type(head) is nn.Linear:
            yield head
    yield model


def _layers(model: PreTrainedModel) -> list[nn.Module]:
    names = set(model._no_split_modules or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def _apply(function: Callable[..., T], *arguments: Any) -> T:
    return function(*arguments)


def call(module: nn.Module, function: Callable[..., T], *arguments: Any) -> T:
    """Return `function(*arguments)`, which reads the module's own weights past its forward; sharded ones are whole within.

    All tensors with a gradient that go in or come out have to be arguments and results: these tell when the backward begins and ends.
    """
    method = getattr(module, _METHOD, None)
    found: T = function(*arguments) if method is None else method(function, *arguments)
    return found


def is_sharded(module: nn.Module) -> bool:
    """Return whether this rank holds a part of the module's weights only, which are gathered when it is called."""
    return isinstance(module, FSDPModule)


def forget_passes(model: nn.Module) -> None:
    """Drop what torch notes of each pass until a backward; a model that is never trained, such as a reference, has none.

    Called between passes, for the whole model. Versions of torch that cannot drop it keep some bytes a layer and pass.
    """
    if isinstance(model, FSDPModule) and hasattr(model, "reset_iter_state"):
        model.reset_iter_state()


def replicate(module: nn.Module, mesh: DeviceMesh) -> None:
    """Let a module's own few weights be whole on every rank, as tensors of the same kind as sharded ones, which optimizers do not mix with others."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        kept = distribute_tensor(parameter.data, mesh, [Replicate()] * mesh.ndim, src_data_rank=None)
        setattr(module, name, nn.Parameter(kept, requires_grad=parameter.requires_grad))


def replica(parameter: Tensor) -> Tensor:
    """Return a parameter as this rank computes with it; of one that `replicate` has made each rank adds its part to the gradient."""
    if not isinstance(parameter, DTensor):
        return parameter
    return parameter.to_local(grad_placements=[Partial()] * parameter.device_mesh.ndim)


def sum_replicas(parameters: Iterable[nn.Parameter]) -> None:
    """Add up the gradients of replicas over all ranks, a collective; those of sharded weights have been summed in their backward.

    In one sum, whose bits are the same everywhere, whatever dimensions the mesh has.
    """
    for parameter in parameters:
        gradient = parameter.grad
        if isinstance(gradient, DTensor) and all(each.is_partial() for each in gradient.placements):
            total = gradient.to_local()
            dist.all_reduce(total)
            replicas = [Replicate()] * gradient.device_mesh.ndim
            parameter.grad = DTensor.from_local(total, gradient.device_mesh, replicas, run_check=False)


def whole(tensor: Tensor) -> Tensor:
    """Return all of a tensor on every rank; of a sharded one this is a collective."""
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():
        gathered: Tensor = tensor.full_tensor()
    return gathered


class GatheredTensors:
    """Sharded tensors by name, each of them made whole when its turn comes, so that no rank holds more than one.

    All ranks iterate over them together, to the end.
    """

    def __init__(self, named: Iterable[tuple[str, Tensor]]) -> None:
        self._named = named

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, whole(tensor)) for name, tensor in self._named)

    def take_part(self) -> None:
        """Gather them for other ranks."""
        for _ in self:
            pass
