"""The strategy `fsdp2`: weights, gradients and moments are spread over the ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import PreTrainedModel

from rhymerl.errors import ConfigError, require_at_least
from rhymerl.models.deferred import DeferredWeights, Filler
from rhymerl.models.fingerprint import fingerprint
from rhymerl.models.sharding import is_sharded, replicate, shard
from rhymerl.training import shards
from rhymerl.training.checkpoint import damage, unreadable

NAME = "fsdp2"


class FSDP2Strategy(ModelParallelStrategy):
    """Lightning's ModelParallelStrategy over torch's `fully_shard`: `trainer.strategy=fsdp2`, on gloo or NCCL.

    With `num_replicas` above 1 the ranks form as many groups that hold all of the weights each (HSDP), and gradients
    are summed over the groups too.
    """

    def __init__(self, *, num_replicas: int = 1) -> None:
        require_at_least({"num_replicas": (num_replicas, 1)})
        super().__init__()
        self.num_replicas = num_replicas

    def check(self) -> None:
        """Raise ConfigError where the ranks cannot be divided; called before the others are there."""
        check_replicas(self.num_replicas, self.num_nodes * self.num_processes)

    # -- processes -------------------------------------------------------------------------------------------------

    def setup_environment(self) -> None:
        self._setup_distributed()
        if self._device_mesh is None:  # else of an earlier stage, whose weights are on it
            self._device_mesh = self._new_mesh()

    def _new_mesh(self) -> DeviceMesh:
        device, size = self.root_device.type, self.world_size
        if self.num_replicas == 1:
            return init_device_mesh(device, (size,), mesh_dim_names=("shard",))
        shape = (self.num_replicas, size // self.num_replicas)
        return init_device_mesh(device, shape, mesh_dim_names=("replicate", "shard"))

    def setup(self, trainer: Any) -> None:
        """Shard the module. Lightning's own leaves that to the module, and would then cast what has been sharded."""
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        self._shard(self.lightning_module, trainer.precision)
        self.model_to_device()
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Context of `trainer.init_module(empty_init=True)`: a RhymeModule gets its weights when it is sharded."""
        with torch.device("meta") if empty_init else nullcontext():
            yield

    def _shard(self, module: Any, precision: str) -> None:
        """Shard a RhymeModule's models over the ranks, unless an earlier stage has.

        They go to their device a layer at a time. Raises ConfigError where a rank has been given other weights than
        rank 0.
        """
        policy, critic = module.model, module.critic
        if is_sharded(policy):
            return
        if "divergence" in module.algo.needs:
            raise ConfigError(
                "algo.over=vocabulary with trainer.strategy=fsdp2: the loss would read the teacher's head, of which each rank has a "
                "part; expected algo.over=sampled, or another strategy"
            )
        reference = module.reference if module.reference is not policy else None
        first, is_teacher = module.policy.weights, module.teacher.path is not None  # whose weights are there
        sources: list[tuple[PreTrainedModel, DeferredWeights | None, str]] = [(policy, first, "")]
        if reference is not None:
            sources.append((reference, None if is_teacher else first, ""))
        if critic is not None and critic.body is not None:
            sources.append((critic.body, critic.weights, critic.prefix))
        late = [weights for _, weights, _ in sources if weights is not None]
        if first is None:
            self._check_equal(fingerprint(policy if late else module))
        fillers = [
            Filler(model, weights, self.root_device, prefix=prefix) if weights is not None else None
            for model, weights, prefix in sources
        ]
        self.precision_plugin.convert_module(module)
        if reference is not None:  # which is no part of the module that has just been cast
            nn.Module.to(reference, policy.dtype)
        compute_dtype = torch.bfloat16 if precision == "bf16-mixed" else None
        for (model, *_), filler in zip(sources, fillers, strict=True):
            shard(model, self.device_mesh, compute_dtype=compute_dtype, fill=filler)
        for weights in late:
            weights.close()
        if fillers[0] is not None:
            module.base_fingerprint = fillers[0].fingerprint()
            self._check_equal(module.base_fingerprint)
        if critic is not None:
            replicate(critic.head, self.device_mesh)

    def _check_equal(self, mine: str) -> None:
        if not self.reduce_boolean_decision(self.broadcast(mine) == mine, all=True):
            raise ConfigError("model: the ranks have been given different weights; expected the same on all of them")

    # -- checkpoints -----------------------------------------------------------------------------------------------

    @property
    def lightning_restore_optimizer(self) -> bool:
        return True  # `load_checkpoint` gives what Lightning's base class expects, but for the parts of other ranks

    def lightning_module_state_dict(self) -> dict[str, Any]:
        assert self.lightning_module is not None
        return self.lightning_module.state_dict(keep_vars=True)  # the parameters themselves tell which are tied

    optimizer_state = Strategy.optimizer_state
    load_model_state_dict = Strategy.load_model_state_dict
    load_optimizer_state_dict = Strategy.load_optimizer_state_dict

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        """Write this rank's part, and then, on rank 0, the file without which no part counts. Called on all ranks."""
        path = Path(filepath)
        rest, tensors = shards.split(checkpoint)
        name = self.broadcast(shards.free_folder(path))
        shards.write(tensors, path.parent / name)
        mine = shards.checksums(path.parent / name, self.global_rank)
        found: list[Any] = [None] * self.world_size
        torch.distributed.all_gather_object(found, mine)
        if self.is_global_zero:
            files = {file: each for part in found for file, each in part.items()}
            record = {"folder": name, "files": files}
            self.checkpoint_io.save_checkpoint({**rest, shards.KEY: record}, path, storage_options=storage_options)
            shards.remove_others(path, kept=name)

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Return a checkpoint with this rank's part of its tensors, whatever ranks or strategy have written it.

        Called on all ranks. Raises ConfigError for a damaged checkpoint, unless it was checked already, and if ranks
        have chosen different ones: a rank may have seen an older state of a shared folder.
        """
        path = Path(checkpoint_path)
        if (first := self.broadcast(path.name)) != path.name:
            raise ConfigError(
                f"ckpt_path={str(path)!r}: the first rank goes on from {first!r}; name the checkpoint for all"
            )
        if getattr(self.checkpoint_io, "checks", True):
            reason = self.broadcast(damage(path) if self.is_global_zero else None)
            if reason:
                raise unreadable(f"ckpt_path={str(path)!r}", reason)
        checkpoint: dict[str, Any] = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        assert self.lightning_module is not None
        weights = self.lightning_module.state_dict()
        is_in_parts = shards.KEY in checkpoint
        folder = shards.folder_of(checkpoint, path, f"ckpt_path={str(path)!r}") if is_in_parts else None
        return shards.take_parts(checkpoint, folder, weights, self.optimizers)

    def remove_checkpoint(self, filepath: str | Path) -> None:
        super().remove_checkpoint(filepath)
        if self.is_global_zero:
            shards.remove_others(Path(filepath))


def check_replicas(num_replicas: int, num_ranks: int) -> None:
    """Raise ConfigError if the ranks cannot be divided into so many groups."""
    if num_ranks % num_replicas:
        raise ConfigError(
            f"trainer.strategy.num_replicas={num_replicas}: so many groups of one size cannot be made of all ranks; expected a "
            f"divisor of their number, {num_ranks}"
        )


StrategyRegistry.register(NAME, FSDP2Strategy, description="weights, gradients and moments are spread over the ranks")
