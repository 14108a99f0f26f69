"""Whether the memory of a run's ranks is enough, and which settings would do where it is not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from rhymerl.data import PromptDataModule
from rhymerl.errors import ConfigError
from rhymerl.models.memory import GIB, Alternative, UpdateShape, fewest_changes, lora_parameters, with_fewer_tokens
from rhymerl.models.outline import Outline, OutlineWeights, Weight
from rhymerl.training.memory import Setup, Trained, rank_memory, setup_of, update_shape
from rhymerl.training.settings import UpdateSettings

_STEP_TOKENS = 1024  # between numbers of backend.kv_tokens that are tried
_MOST_TIMES = 64  # as many nodes
_DEVICES = (2, 4, 8)  # of one node, that are tried

Applied = tuple[str, Setup]


def missing_bytes(setup: Setup, device_bytes: int) -> int:
    """Return the bytes that are too few on a device of that many, 0 or less where a rank fits."""
    return rank_memory(setup).total - device_bytes


def nearest(setup: Setup, device_bytes: int) -> list[str] | None:
    """Return the fewest settings with which a rank fits, none where it does; None where no settings are known to."""

    def missing(tried: Setup) -> int:
        return missing_bytes(tried, device_bytes)

    found = fewest_changes(setup, _changes(setup, missing), missing)
    return None if found is None else found[0]


def check_memory(module: Trained, trainer: Any, datamodule: PromptDataModule) -> tuple[Setup, int | None]:
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
    """Raise ConfigError for weights that a device cannot hold, or, when the optimizer steps, gradients and moments beside them.

    Those of an optimizer that is not ours may be elsewhere. Estimates refuse nothing.
    """
    memory = rank_memory(setup)
    is_ours = type(update).optimizer is UpdateSettings.optimizer
    shape = update_shape(setup)
    certain = memory.models + (shape.trained_bytes * (1 + shape.states) if is_ours else 0)
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


def advice(words: Sequence[str] | None) -> str:
    """Return what to do, in words."""
    if words is None:
        return "no settings are known to fit: take a smaller model, or larger or more GPUs"
    return f"with {' '.join(words)} it should fit"


# -- settings that take less -------------------------------------------------------------------------------------------


def _changes(setup: Setup, missing: Callable[[Setup], int]) -> Sequence[Alternative[Setup]]:
    """Return them, those first that change least of what is trained and how."""
    layout, engine = setup.layout, setup.engine
    in_rank = engine is not None and not setup.is_apart
    itemsize = update_shape(setup).weight_itemsize if not layout.is_sharded else setup.model.itemsize
    wanted: list[tuple[bool, Callable[[Setup], Applied], bool]] = [
        (not setup.activation_checkpointing, _checkpoints, False),
        (in_rank and bool(engine and engine.context) and not setup.in_turn, _takes_turns, False),
        (True, lambda each: _smaller_parts(each, missing), True),
        (in_rank and engine is not None and not engine.weights, lambda each: _fewer_keys(each, missing), True),
        (not setup.offloads_optimizer, _offloads, False),
        (layout.is_sharded and not setup.is_apart, _apart, False),
        (layout.is_sharded and layout.num_replicas > 1, _one_replica, False),
        (not layout.is_sharded and layout.num_ranks > 1, _sharded, False),
        (layout.num_ranks == 1, lambda each: _more_devices(each, missing), True),
        (layout.num_ranks > 1, lambda each: _more_nodes(each, missing), True),
        (setup.precision != "bf16-true" and itemsize == 4, _in_half, False),
        (not update_shape(setup).has_adapters, _with_adapters, False),
    ]
    return [Alternative(apply=apply, is_number=is_number) for is_there, apply, is_number in wanted if is_there]


def _checkpoints(setup: Setup) -> Applied:
    return "update.activation_checkpointing=true", replace(setup, activation_checkpointing=True)


def _takes_turns(setup: Setup) -> Applied:
    return "backend.release_memory=true", replace(setup, in_turn=True)


def _offloads(setup: Setup) -> Applied:
    return "update.offload_optimizer=true", replace(setup, offloads_optimizer=True)


def _apart(setup: Setup) -> Applied:
    return "backend=ray", replace(setup, is_apart=True, in_turn=False)


def _one_replica(setup: Setup) -> Applied:
    return "trainer.strategy.num_replicas=1", replace(setup, layout=replace(setup.layout, num_replicas=1))


def _sharded(setup: Setup) -> Applied:
    """An engine in a rank goes to workers of their own."""
    words = "trainer.strategy=fsdp2" if setup.is_apart else "trainer.strategy=fsdp2 backend=ray"
    layout = replace(setup.layout, num_replicas=1, is_sharded=True)
    return words, replace(setup, layout=layout, is_apart=True, in_turn=False)


def _more_devices(setup: Setup, missing: Callable[[Setup], int]) -> Applied:
    """Return the fewest devices of a node among which it fits."""
    words, found = _sharded(setup)
    for devices in _DEVICES:
        found = replace(found, layout=replace(found.layout, num_ranks=devices))
        if missing(found) <= 0:
            break
    return f"trainer.devices={found.layout.num_ranks} {words}", found


def _in_half(setup: Setup) -> Applied:
    model = replace(setup.model, itemsize=2, compute_itemsize=2)
    return "trainer.precision=bf16-true", replace(setup, precision="bf16-true", model=model)


def _smaller_parts(setup: Setup, missing: Callable[[Setup], int]) -> Applied:
    def after(update: UpdateShape) -> Setup:
        return replace(setup, micro_batch_tokens=update.micro_batch_tokens)

    found = with_fewer_tokens(update_shape(setup), lambda update: missing(after(update)))
    return f"update.micro_batch_tokens={found.micro_batch_tokens}", after(found)


def _fewer_keys(setup: Setup, missing: Callable[[Setup], int]) -> Applied:
    engine = setup.engine
    if engine is None or setup.is_apart:
        return "", setup
    least = -(-setup.model.longest_tokens // _STEP_TOKENS) * _STEP_TOKENS
    found = setup
    for tokens in range(engine.longest_tokens - _STEP_TOKENS, least - 1, -_STEP_TOKENS):
        found = replace(setup, engine=replace(engine, longest_tokens=tokens))
        if missing(found) <= 0:
            break
    kept = found.engine
    return f"backend.kv_tokens={kept.longest_tokens if kept is not None else 0}", found


def _more_nodes(setup: Setup, missing: Callable[[Setup], int]) -> Applied:
    """Return twice as many nodes until it fits; without sharding more of them hold as much each."""
    layout, found, times = setup.layout, setup, 1
    while setup.layout.is_sharded and times < _MOST_TIMES and missing(found) > 0:
        times *= 2
        more = replace(layout, num_ranks=times * layout.num_ranks, num_nodes=times * layout.num_nodes)
        found = replace(setup, layout=more)
    return f"trainer.num_nodes={found.layout.num_nodes}", found


def _with_adapters(setup: Setup) -> Applied:
    adapters = Weight(shape=(lora_parameters(update_shape(setup)),), itemsize=4, is_full=True)
    tensors = setup.tensors
    critic = (*_frozen(tensors.critic), adapters) if setup.has_own_critic else tensors.critic
    adapted = Outline(policy=(*_frozen(tensors.policy), adapters), critic=critic)
    return "adapter=lora", replace(setup, tensors=adapted)


def _frozen(weights: OutlineWeights) -> OutlineWeights:
    return tuple(each if each.is_whole else replace(each, is_trained=False) for each in weights)
