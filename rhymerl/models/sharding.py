"""Weights sharded over ranks: each holds a part of every tensor, and a layer is whole while it computes.

torch's `fully_shard` (FSDP2) gathers the weights of a group before its forward and its backward, and spreads the sum of
its gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
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
BLOCK_BYTES = 2**28  # of a tensor that is gathered for workers


def shard(
    model: PreTrainedModel,
    mesh: DeviceMesh,
    *,
    compute_dtype: torch.dtype | None = None,
    fill: Callable[[nn.Module], None] | None = None,
) -> None:
    """Spread a language model, with or without its head, over the ranks of a mesh; all of them give the same weights.

    `fill` gives a group of weights its content, before its parts are all that stays. On a mesh of two dimensions only
    the second one shards. Weights are gathered in `compute_dtype` (None: in their own), and gradients of 16 bits are
    summed in float32. Raises ConfigError for a model whose layers are not known.
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
    """Return `function(*arguments)`, which reads the module's own weights outside its forward.

    Sharded weights are whole within. All tensors with a gradient that go in or come out have to be arguments and
    results: these tell when the backward begins and ends.
    """
    method = getattr(module, _METHOD, None)
    found: T = function(*arguments) if method is None else method(function, *arguments)
    return found


def is_sharded(module: nn.Module) -> bool:
    """Return whether this rank holds a part of the module's weights only, which are gathered when it is called."""
    return isinstance(module, FSDPModule)


def forget_passes(model: nn.Module) -> None:
    """Drop torch's per-pass records, which last until a backward: models that are never trained have none.

    A reference is such a model. Called between passes, for the whole model. Versions of torch that cannot drop it keep
    some bytes a layer and pass.
    """
    if isinstance(model, FSDPModule) and hasattr(model, "reset_iter_state"):
        model.reset_iter_state()


def replicate(module: nn.Module, mesh: DeviceMesh) -> None:
    """Keep a module's own few weights whole on every rank, as tensors of the same kind as sharded ones.

    Optimizers do not mix the two kinds.
    """
    for name, parameter in list(module.named_parameters(recurse=False)):
        kept = distribute_tensor(parameter.data, mesh, [Replicate()] * mesh.ndim, src_data_rank=None)
        setattr(module, name, nn.Parameter(kept, requires_grad=parameter.requires_grad))


def replica(parameter: Tensor) -> Tensor:
    """Return a parameter as this rank computes with it; ranks add their parts to a `replicate`d one's gradient."""
    if not isinstance(parameter, DTensor):
        return parameter
    return parameter.to_local(grad_placements=[Partial()] * parameter.device_mesh.ndim)


def sum_replicas(parameters: Iterable[nn.Parameter]) -> None:
    """Sum the gradients of replicas over all ranks, a collective; backward has summed those of sharded weights.

    It is one sum, whose bits are the same everywhere, whatever dimensions the mesh has.
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


def replicated(tensor: Tensor) -> Tensor:
    """Return a tensor, whole on all ranks, that works with sharded ones; for a sharded one this is a collective.

    Rows of b times a whole a are rows of their product, with nothing to send.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    return tensor.redistribute(placements=[Replicate()] * tensor.device_mesh.ndim)


class GatheredTensors:
    """Sharded tensors by name, each of them made whole in the host's memory of rank 0.

    Rank 0 iterates while the others of its group `take_part`, to the end. Some elements of each rank's part are
    gathered at a time, in all no more than about `block_bytes`, and the next ones while the former are copied or sent;
    so a device has two such blocks.
    """

    def __init__(self, named: Iterable[tuple[str, Tensor]], *, block_bytes: int = BLOCK_BYTES) -> None:
        self._named = named
        self._block_bytes = block_bytes

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        pending: _Finish = iter(())
        for begun in self._begun():
            yield from pending
            pending = begun
        yield from pending

    def everywhere(self) -> Iterator[tuple[str, Tensor]]:
        """Yield them whole on every rank and on its device, one after another; all ranks do."""
        for name, tensor in self._named:
            yield name, whole(tensor)

    def take_part(self) -> None:
        """Send this rank's parts to rank 0."""
        for _ in self:
            pass

    def _begun(self) -> Iterator[_Finish]:
        """Yield how to finish each block that has begun to be gathered."""
        for name, tensor in self._named:
            if not isinstance(tensor, DTensor):
                yield iter([(name, tensor)])
            elif 0 in dist.get_process_group_ranks(_group(tensor)):  # other groups have replicas
                yield from self._blocks_of(name, tensor)

    def _blocks_of(self, name: str, tensor: DTensor) -> Iterator[_Finish]:
        assert tensor.placements[-1].is_shard(0), "fully_shard divides the first dimension"
        ranks = tensor.device_mesh.size(-1)
        share = -(-len(tensor) // ranks) * tensor.shape[1:].numel()
        step = max(1, self._block_bytes // (tensor.itemsize * ranks))
        is_mine = dist.get_rank() == 0
        whole = torch.empty(tensor.shape, dtype=tensor.dtype) if is_mine else None
        local: Tensor = tensor.to_local().detach().reshape(-1)
        for start in range(0, share, step):
            stop = min(start + step, share)
            mine = local[start:stop]
            if len(mine) < stop - start:  # the last ranks may have fewer
                mine = torch.cat([mine, mine.new_zeros(stop - start - len(mine))])
            parts = [torch.empty_like(mine) for _ in range(ranks)] if is_mine else None
            # On CPUs there is nothing to hide it behind: gloo's threads would take the cores that the copies need.
            work = dist.gather(mine, parts, dst=0, group=_group(tensor), async_op=mine.is_cuda)
            places = [] if whole is None else [each[start:stop] for each in whole.view(-1).split(share)]
            found = [(name, whole)] if whole is not None and stop == share else []
            yield _finish(work, mine, list(zip(places, parts or [], strict=False)), found)


_Finish = Iterator[tuple[str, Tensor]]  # waits for a block; yields the whole tensor after its last one, on rank 0


def _finish(
    work: dist.Work | None, sent: Tensor, parts: Sequence[tuple[Tensor, Tensor]], found: Sequence[tuple[str, Tensor]]
) -> _Finish:
    """Wait for parts, each with its place in the tensor, which may be shorter; `sent` is held until they are there."""
    if work is not None:
        work.wait()
    for place, part in parts:
        place.copy_(part[: len(place)])
    yield from found


def _group(tensor: DTensor) -> dist.ProcessGroup:
    """Return the ranks that have parts of a tensor."""
    return tensor.device_mesh.get_group(tensor.device_mesh.ndim - 1)
