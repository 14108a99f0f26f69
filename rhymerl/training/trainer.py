"""The demands on a Lightning Trainer, and the requests to it."""

from __future__ import annotations

import logging
import os
import re
import resource
import signal
import socket
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, cast

import lightning as L
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.accelerators import MPSAccelerator
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.distributed.utils import _sync_module_states, _verify_param_shape_across_processes

from rhymerl.backends.base import Backend
from rhymerl.backends.embedded import EmbeddedBackend
from rhymerl.config import instantiate
from rhymerl.config.targets import import_target
from rhymerl.config.tree import is_component
from rhymerl.data import PromptDataModule
from rhymerl.distributed.cores import usable_cores
from rhymerl.distributed.failure_detector import is_loopback
from rhymerl.distributed.first import is_first_rank
from rhymerl.distributed.parent import end_with_parent
from rhymerl.errors import ConfigError, RunError
from rhymerl.progress import counted
from rhymerl.training.fsdp2 import FSDP2Strategy

_LOG = logging.getLogger(__name__)
_LIGHTNING_LOGS_EVERY = 50  # steps
_LOOPBACKS = ("lo", "lo0")  # as Linux and others call it
AFTER_EXCEPTION = "exception"  # the stage of a teardown that Lightning does not call itself
_BUCKET_BYTES = 250 * 2**20  # DDP's own for this


def make_trainer(settings: Mapping[str, Any]) -> L.Trainer:
    """Return the Trainer of these settings, a config node. Raises ConfigError naming the one Lightning refuses."""
    accelerator = settings.get("accelerator")
    usable = [
        "auto",
        "cpu",
        *(["gpu", "cuda"] * torch.cuda.is_available()),
        *(["gpu", "mps"] * MPSAccelerator.is_available()),
    ]
    if accelerator in ("gpu", "cuda", "mps") and accelerator not in usable:
        raise ConfigError(
            f"trainer.accelerator={accelerator!r}: this machine has none that torch can use; expected {', '.join(usable)}"
        )
    try:
        trainer: L.Trainer = instantiate(settings, key="trainer")
    except MisconfigurationException as error:
        message = " ".join(str(error).split())
        named = next((name for name in re.findall(r"\w+", message) if name in settings), None)
        setting = f"trainer.{named}={settings[named]!r}" if named else "trainer"
        raise ConfigError(f"{setting}: {message}") from error
    return trainer


def num_optimizer_steps(trainer: L.Trainer, each: int) -> float:
    """Return the optimizer steps of the run, at most max_steps, `each` per rollout step; infinite without end."""
    by_steps = float(trainer.max_steps) if trainer.max_steps >= 0 else float("inf")
    if trainer.max_epochs is None or trainer.max_epochs < 0:
        return by_steps
    trainer.fit_loop.setup_data()
    return min(by_steps, float(trainer.num_training_batches) * trainer.max_epochs * each)


def validate_within_fit(trainer: Any) -> None:
    """Validate now, in a hook of a fit, as Lightning itself does between two batches."""
    loop, connector = trainer.fit_loop.epoch_loop.val_loop, trainer._logger_connector
    first_batch = connector._first_loop_iter
    trainer.validating = True
    trainer.lightning_module.on_validation_model_zero_grad()
    loop.restarting = False  # it may have been loaded from a checkpoint
    loop.run()
    trainer.training = True
    connector._first_loop_iter = first_batch


def datamodule_of(trainer: Any) -> PromptDataModule:
    """Raises ConfigError when it has another one."""
    datamodule = getattr(trainer, "datamodule", None)
    if not isinstance(datamodule, PromptDataModule):
        raise ConfigError(
            f"the Trainer got datamodule={type(datamodule).__name__}: a rhymerl.PromptDataModule is needed, because "
            "its cursor is what makes a run resume exactly"
        )
    return datamodule


def check_trainer(trainer: Any) -> None:
    """Raise ConfigError for a Trainer flag that cannot be honoured, with the reason."""
    _check_strategy(trainer)
    _check_requeueing(trainer)
    check_precision(trainer.precision)
    if trainer.gradient_clip_val:
        raise ConfigError(
            f"trainer.gradient_clip_val={trainer.gradient_clip_val}: Lightning clips nothing when a step runs its own "
            "optimizer steps; set update.max_grad_norm"
        )
    if trainer.accumulate_grad_batches != 1:
        raise ConfigError(
            f"trainer.accumulate_grad_batches={trainer.accumulate_grad_batches}: a batch is a whole rollout step; "
            "update.micro_batch_tokens bounds what is on the device at a time, data.prompts_per_step sets the step's size"
        )
    if trainer.overfit_batches > 0:
        raise ConfigError(
            f"trainer.overfit_batches={trainer.overfit_batches}: a batch is the prompts of a step, so use a small data.train "
            "or trainer.limit_train_batches"
        )


def check_backend(trainer: Any, backend: Backend) -> None:
    """Raise ConfigError for an engine in each rank where ranks hold parts of the policy."""
    if isinstance(trainer.strategy, FSDP2Strategy):
        refuse_engine_in_rank(backend)


def refuse_engine_in_rank(backend: Backend) -> None:
    """Raise ConfigError for a backend that needs the whole policy in each rank."""
    has_copy = isinstance(backend, EmbeddedBackend) and backend.whole_copy
    if not (has_copy or backend.workers_are_remote):
        raise ConfigError(
            f"trainer.strategy=fsdp2 with {type(backend).__name__}: its engine needs the whole policy in each rank, which has a part of it "
            "only; expected workers with weights of their own, backend=ray (with backend.engine=embedded or sglang) or backend=sglang with "
            "backend.url, backend=embedded with backend.whole_copy=true where a whole policy fits beside the parts, or trainer.strategy=ddp"
        )


def _check_strategy(trainer: Any) -> None:
    strategy = trainer.strategy
    name = f"trainer.strategy={type(strategy).__name__}"
    if isinstance(strategy, SingleDeviceStrategy):
        return
    if isinstance(strategy, FSDP2Strategy):
        strategy.check()
        return
    if not isinstance(strategy, DDPStrategy):
        raise ConfigError(
            f"{name}: the update knows ranks that hold whole weights, and those that fsdp2 spreads; expected ddp, fsdp2, or auto on one device"
        )
    if strategy._start_method != "popen":
        raise ConfigError(
            f"{name} with start_method={strategy._start_method!r}: the history would be lost with the processes; expected ddp, whose "
            "ranks are started as scripts, or a launcher such as torchrun"
        )
    if strategy._ddp_comm_hook is not None or strategy._model_averaging_period is not None:
        raise ConfigError(
            f"{name}: a communication hook or model averaging would never be asked, because gradients are summed once a "
            "mini-batch over global token counts; leave ddp_comm_hook and model_averaging_period out"
        )
    if type(strategy).configure_ddp is not DDPStrategy.configure_ddp:
        raise ConfigError(
            f"{name}: its own configure_ddp would never be asked, because the model is not wrapped: gradients are summed once a "
            "mini-batch; expected ddp"
        )


def _check_requeueing(trainer: Any) -> None:
    environment = trainer._accelerator_connector.cluster_environment
    if isinstance(environment, SLURMEnvironment) and environment.auto_requeue:
        raise ConfigError(
            "trainer.plugins: under SLURM Lightning answers the signal before a requeue with a checkpoint in the middle of a step, from "
            "which no run could go on exactly; pass SLURMEnvironment(auto_requeue=False), and let the job go on from its last checkpoint"
        )


def prepare_trainer(trainer: Any, backend: Backend) -> None:
    """Check as `check_trainer` and `check_backend` do, and prepare the ranks before Lightning opens the process group.

    The model stays without a wrapper. On one machine its store listens where no other machine can reach it. Raises
    RunError when its port is taken. Each step is logged, unless the Trainer was told otherwise. A fit begins with
    `warn_of_cores`.
    """
    try:
        check_trainer(trainer)
        check_backend(trainer, backend)
        if trainer.state.fn == TrainerFn.FITTING:
            warn_of_cores(trainer)
        # Lightning's default interval, even if a user sets it, is for steps of milliseconds.
        if trainer.log_every_n_steps == _LIGHTNING_LOGS_EVERY:
            trainer.log_every_n_steps = 1
        strategy = trainer.strategy
        if isinstance(strategy, DDPStrategy):
            # Ranks begin with equal weights, but without DDP: the update sums gradients itself, and DDP's buckets have
            # the size of all gradients. On the object, because it is the Trainer's, which the user may have made.
            vars(strategy)["configure_ddp"] = lambda: equal_weights(cast(nn.Module, strategy.model))
        _prepare_ranks(trainer)
    except BaseException:
        end_ranks(trainer)
        raise


def _prepare_ranks(trainer: L.Trainer) -> None:
    if dist.is_initialized():  # there is a process group already
        return
    end_with_parent()
    strategy = trainer.strategy
    if not isinstance(strategy, DDPStrategy | FSDP2Strategy) or strategy.num_nodes > 1:
        return
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # torchrun has made the store
        return
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    environment = strategy.cluster_environment
    assert environment is not None, "of every such strategy that a Trainer has"
    if not is_loopback(environment.main_address):
        return
    names = [name for _, name in socket.if_nameindex() if name in _LOOPBACKS]
    if names:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", names[0])
    if environment.local_rank() == 0:
        # Kept where Lightning looks for the ranks, which has a store of its own soon.
        vars(environment)["store"] = _store_on_loopback(environment.main_port, strategy.num_processes)


def _store_on_loopback(port: int, num_ranks: int) -> Any:
    """Return a store on the loopback address, since torch's own listens on all addresses.

    It joins a store of its kind that this process has at that port.
    """
    try:
        server = socket.create_server(("127.0.0.1", port))
    except OSError as error:
        raise RunError(
            f"MASTER_PORT={port}: the ranks cannot meet there ({error}); set another, or leave it out"
        ) from error
    options: dict[str, Any] = {"is_master": True, "multi_tenant": True, "wait_for_workers": False}
    return dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", port, num_ranks, timeout=timedelta(minutes=30), master_listen_fd=server.detach(), **options
    )


def end_ranks(trainer: L.Trainer) -> None:
    """End the ranks that rank 0 has started, where it fails before there is a process group: they would wait long."""
    launcher = trainer.strategy.launcher
    if isinstance(launcher, _SubprocessScriptLauncher) and not dist.is_initialized():
        launcher.kill(signal.SIGKILL)


def warn_of_cores(trainer: Any) -> None:
    """Say, on rank 0, that ranks on a CPU have to take turns, where they outnumber its cores."""
    ranks, cores = trainer.num_devices, usable_cores()
    if trainer.strategy.root_device.type == "cpu" and ranks > cores and is_first_rank():
        _LOG.warning(
            "trainer.devices=%d: %s share %s, so they take turns and are slower than %d would be",
            ranks,
            counted(ranks, "rank"),
            counted(cores, "CPU core"),
            cores,
        )


def follow_trainer(*parts: Any) -> bool:
    """Return whether the Trainer is deterministic; if so, parts with `deterministic=None` become so too."""
    is_wanted = torch.are_deterministic_algorithms_enabled()
    for part in parts if is_wanted else ():
        if getattr(part, "deterministic", False) is None:
            part.deterministic = True
    return is_wanted


def with_environment(plugins: Sequence[Any] | None) -> list[Any]:
    """Return a Trainer's plugins, and SLURM, where it is there, without requeueing; one that is among them stays."""
    asked = list(plugins or [])
    is_slurm = SLURMEnvironment.detect() and not TorchElasticEnvironment.detect()
    is_wanted = is_slurm and not any(map(_is_environment, asked))
    return [*asked, SLURMEnvironment(auto_requeue=False)] if is_wanted else asked


def _is_environment(plugin: Any) -> bool:
    kind = import_target(plugin["_target_"], setting="trainer.plugins") if is_component(plugin) else type(plugin)
    return isinstance(kind, type) and issubclass(kind, ClusterEnvironment)


def check_precision(precision: object) -> None:
    """Raise ConfigError for float16; apart from `check_trainer` because a Trainer on a CPU makes bfloat16 of it."""
    if str(precision).startswith("16"):
        raise ConfigError(
            f"trainer.precision={precision!r}: float16 needs loss scaling, under which the engine's log-probs would "
            "not be the update's; use bf16-mixed, bf16-true, 32-true or 64-true"
        )


def performance(num_tokens: int, seconds: float, device: torch.device) -> dict[str, float]:
    """Return the metrics of a step's speed, by its seconds and response tokens.

    The peak is that of the device's allocator, or of the process on a CPU.
    """
    peak_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    is_on_gpu = device.type == "cuda"
    return {
        "timing_s/step": seconds,
        "perf/time_per_step": seconds,
        "perf/tokens_per_s": num_tokens / seconds,
        "perf/peak_memory_gb": torch.cuda.max_memory_allocated(device) / 2**30 if is_on_gpu else peak_kb / 2**20,
    }


class TeardownOnException(L.Callback):
    """Tells the module which error ends the fit and calls its `teardown`: Lightning does not after an exception."""

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        module: Any = pl_module
        module.fail(exception)
        module.teardown(AFTER_EXCEPTION)


def equal_weights(module: nn.Module) -> None:
    """Give every rank the first one's parameters and buffers, as DDP does when it is made; this is a collective.

    Raises RuntimeError on ranks whose parameters have other shapes than the first one's.
    """
    group = dist.group.WORLD
    assert group is not None, "the process group has been initialised"
    _verify_param_shape_across_processes(group, list(module.parameters()))
    _sync_module_states(module, group, _BUCKET_BYTES, src=0, params_and_buffers_to_ignore=())
