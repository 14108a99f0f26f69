"""The memory of a module's ranks: the estimate's inputs, and the message for GPUs that are too small."""

from __future__ import annotations

from typing import Any

import torch

from rhymerl.data import PromptDataModule
from rhymerl.errors import ConfigError
from rhymerl.memory.base import GIB, Layout, Setup
from rhymerl.memory.fitting import advice, missing_bytes, nearest
from rhymerl.memory.outline import model_shape, outline
from rhymerl.memory.parts import rank_memory
from rhymerl.models.logprobs import default_chunk_tokens
from rhymerl.training.checks import longest_tokens
from rhymerl.training.fsdp2 import FSDP2Strategy
from rhymerl.training.offload import HOST
from rhymerl.training.settings import UpdateSettings

_MIXED = "-mixed"
_ITEMSIZES = {"bf16-true": 2, "64-true": 8}  # of weights, by the precisions that cast them


def setup_of(module: Any, trainer: Any, datamodule: PromptDataModule) -> Setup:
    """Return what the memory of the ranks of a Trainer follows from, once the data has been prepared."""
    longest = longest_tokens(datamodule, rollout=module.rollout, evaluation=module.evaluation)
    loader, update = datamodule.train_loader, module.update
    head = module.model.get_output_embeddings()
    assert head is not None, "prove_update has found one"
    return make_setup(
        module,
        layout=_layout(trainer),
        precision=str(trainer.precision),
        longest=longest,
        step_tokens=longest * (loader.prompts_per_step * module.rollout.group_size if loader is not None else 1),
        chunk_tokens=update.chunk_tokens or default_chunk_tokens(head),
        offloads_optimizer=update.offload_optimizer and trainer.strategy.root_device.type != HOST.type,
    )


def _layout(trainer: Any) -> Layout:
    ranks, is_sharded = trainer.world_size, isinstance(trainer.strategy, FSDP2Strategy)
    replicas = trainer.strategy.num_replicas if is_sharded else ranks
    return Layout(num_ranks=ranks, num_nodes=trainer.num_nodes, num_replicas=replicas, is_sharded=is_sharded)


def make_setup(
    run: Any,
    *,
    layout: Layout,
    precision: str,
    longest: int,
    step_tokens: int,
    chunk_tokens: int,
    offloads_optimizer: bool,
) -> Setup:
    """Return what memory follows from, by a RhymeModule or what has its parts.

    Models may be on the meta device, and the reference may be the model itself.
    """
    model, critic, algo, update, backend = run.model, run.critic, run.algo, run.update, run.backend
    itemsize = _ITEMSIZES.get(precision, model.dtype.itemsize)
    is_mixed = precision.endswith(_MIXED)
    shape = model_shape(model, longest, itemsize=itemsize, compute_itemsize=min(2, itemsize) if is_mixed else itemsize)
    tensors = outline(model, reference=run.reference, critic=critic)
    has_body = critic is not None and critic.body is not None
    asks = "proximal" in algo.needs or (update.optimizer_steps > 1 and "proximal_in_loss" in algo.needs)
    return Setup(
        tensors=tensors.cast(itemsize) if precision in _ITEMSIZES else tensors,
        model=shape,
        layout=layout,
        is_mixed=is_mixed,
        is_eager=model.config.get_text_config()._attn_implementation == "eager",
        states=update.states,
        epochs=update.epochs,
        mini_batches=update.mini_batches,
        micro_batch_tokens=update.micro_batch_tokens,
        step_tokens=step_tokens,
        chunk_tokens=chunk_tokens,
        activation_checkpointing=update.activation_checkpointing,
        offloads_optimizer=offloads_optimizer,
        policy_forwards=(asks and not backend.draws_exactly)
        + ("reference" in algo.needs and not tensors.reference)
        + ("values" in algo.needs and not has_body),
        engine=backend.memory(shape, run.drafter, run.budget),
        is_apart=backend.workers_are_remote,
        in_turn=backend.release_memory,
    )


# -- whether it is enough ----------------------------------------------------------------------------------------------


def check_memory(module: Any, trainer: Any, datamodule: PromptDataModule) -> tuple[Setup, int | None]:
    """Return what the memory of the ranks follows from, and how much a rank's GPU has, None of any other device.

    Raises ConfigError where what exists at once in any case is more than the GPU has.
    """
    setup, device = setup_of(module, trainer, datamodule), _gpu_of(trainer)
    if device is None:
        return setup, None
    total = int(torch.cuda.get_device_properties(device).total_memory)
    if trainer.max_steps != 0 and trainer.max_epochs != 0:
        refuse_too_large(setup, module.update, total)
    return setup, total


def _gpu_of(trainer: Any) -> torch.device | None:
    device: torch.device = trainer.strategy.root_device
    return device if device.type == "cuda" else None


def refuse_too_large(setup: Setup, update: UpdateSettings, device_bytes: int) -> None:
    """Raise ConfigError for weights, or weights with gradients and moments, that a device cannot hold.

    Gradients and moments count when the optimizer steps. Those of an optimizer that is not ours may be elsewhere.
    Estimates refuse nothing.
    """
    is_ours = type(update).optimizer is UpdateSettings.optimizer
    certain = rank_memory(setup).models + (setup.trained_bytes * (1 + setup.states) if is_ours else 0)
    if certain > device_bytes:
        kinds = "weights, gradients and moments" if is_ours else "weights"
        raise ConfigError(
            f"model: {kinds} of a rank take {certain / GIB:.1f} GiB, and its GPU has {device_bytes / GIB:.1f}; "
            f"{advice(nearest(setup, device_bytes))}"
        )


def too_small(setup: Setup, device_bytes: int | None) -> str | None:
    """Return what to say where the estimate is more than the device has; None where it is not, or nobody knows."""
    if device_bytes is None or (missing := missing_bytes(setup, device_bytes)) <= 0:
        return None
    return f"memory   may be {missing / GIB:.1f} GiB too small\n         {advice(nearest(setup, device_bytes))}"
