"""The memory and traffic of a run from its settings alone: `rhymerl plan`, and the end of `rhymerl fit --dry-run`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from rhymerl.algos import GRPO
from rhymerl.backends.embedded import EmbeddedBackend
from rhymerl.budgets import GoodputBudget
from rhymerl.config import instantiate, resolved
from rhymerl.config.targets import import_target
from rhymerl.config.tree import is_component
from rhymerl.distributed.first import is_first_rank
from rhymerl.drafters import HistoryTreeDrafter
from rhymerl.environments.build import environment_of
from rhymerl.errors import ConfigError
from rhymerl.memory.base import GIB, Layout, Setup
from rhymerl.memory.fitting import advice, missing_bytes, nearest
from rhymerl.memory.parts import rank_memory
from rhymerl.memory.traffic import num_backwards, traffic
from rhymerl.models.critic import CriticSettings
from rhymerl.models.logits import num_embeddings
from rhymerl.models.logprobs import usual_chunk_tokens
from rhymerl.models.policy import context_tokens
from rhymerl.report.printing import print_table, say
from rhymerl.rollout import RolloutSettings
from rhymerl.runs.examined_model import outline_of
from rhymerl.training.checks import check_algorithm
from rhymerl.training.evaluation import EvaluationSettings
from rhymerl.training.fsdp2 import NAME, FSDP2Strategy, check_replicas
from rhymerl.training.memory import make_setup
from rhymerl.training.settings import UpdateSettings
from rhymerl.training.teacher import TeacherSettings
from rhymerl.training.trainer import check_precision, refuse_engine_in_rank
from rhymerl.workers import backend_of_workers

Result = dict[str, Any]
_PRECISIONS = {"none": "32-true", "32": "32-true", "64": "64-true", "bf16": "bf16-mixed"}  # Lightning's short names
_PARTS: Mapping[str, Callable[[], Any]] = {  # of a module that memory follows from, and what they are by default
    "algo": GRPO,
    "rollout": RolloutSettings,
    "update": UpdateSettings,
    "evaluation": EvaluationSettings,
    "backend": EmbeddedBackend,
    "critic": CriticSettings,
    "teacher": TeacherSettings,
    "drafter": HistoryTreeDrafter,
    "budget": GoodputBudget,
}
_DEFAULT_GPU = 80 * GIB  # whose chunks of logits are as large as those of any larger one


def plan(config: DictConfig, *, device_gib: float | None = None) -> Result:
    """Print and return what each rank holds and sends, by the model's config. Raises ConfigError for bad settings."""
    if device_gib is not None and not 0 < device_gib < float("inf"):
        raise ConfigError(f"--device-gib {device_gib}: expected a number above 0")
    device_bytes = int(device_gib * GIB) if device_gib is not None else _device_here(config)
    setup = setup_from(config, device_bytes=device_bytes)
    result = describe(setup, device_bytes)
    show(result)
    if config.data.get("max_prompt_tokens") is None:
        say("data.max_prompt_tokens is not set: the longest sequence is counted as an answer without its prompt")
    return result


def _device_here(config: DictConfig) -> int | None:
    if config.trainer.get("accelerator") == "cpu" or not torch.cuda.is_available():
        return None
    return int(torch.cuda.get_device_properties(0).total_memory)


# -- from settings -----------------------------------------------------------------------------------------------------


def setup_from(config: DictConfig, *, device_bytes: int | None) -> Setup:
    """Return what memory follows from, by the settings of a run; the model is made without content."""
    for name in ("train", "validation"):
        if OmegaConf.is_missing(config.data, name):
            config.data[name] = None
    settings = resolved(config)
    parts, data, trainer = settings["module"], settings["data"], settings["trainer"]
    run: Any = SimpleNamespace(
        **{name: instantiate(parts[name], key=name, default=default) for name, default in _PARTS.items()}
    )
    run.backend = backend_of_workers(run.backend)
    check_algorithm(run.algo, rollout=run.rollout, update=run.update, backend=run.backend)
    precision = _precision(trainer.get("precision"))
    layout = _layout(trainer)
    if layout.is_sharded:
        refuse_engine_in_rank(run.backend)
    run.model = outline_of(parts["model"], use="plan with")
    run.critic = run.critic.outline(run.model) if "values" in run.algo.needs else None
    run.reference = run.teacher.outline(run.model, run.algo)
    task = instantiate(data.get("task"), key="task")
    environment = environment_of(instantiate(parts.get("environment"), key="environment"), task)
    most_tokens = data.get("max_prompt_tokens") or 0
    if environment is not None:
        most_tokens += run.rollout.most_reply_tokens
    longest = _longest(run.rollout, run.evaluation, most_tokens, context_tokens(run.model.config))
    on_gpu = trainer.get("accelerator") != "cpu"
    gpu_bytes = (device_bytes or _DEFAULT_GPU) if on_gpu else None
    return make_setup(
        run,
        layout=layout,
        precision=precision,
        longest=longest,
        step_tokens=data.get("prompts_per_step", 1) * run.rollout.group_size * longest,
        chunk_tokens=run.update.chunk_tokens or usual_chunk_tokens(num_embeddings(run.model), gpu_bytes=gpu_bytes),
        offloads_optimizer=run.update.offload_optimizer and on_gpu,
    )


def _longest(rollout: RolloutSettings, evaluation: EvaluationSettings, other_tokens: int, context: int) -> int:
    answers = [rollout.max_tokens, *(evaluation.max_tokens_of(name) or 0 for name in ("", *(evaluation.sets or {})))]
    return min(context, other_tokens + max(answers))


def _precision(asked: object) -> str:
    check_precision(asked)
    return _PRECISIONS.get(str(asked).lower(), str(asked))


def _layout(trainer: Mapping[str, Any]) -> Layout:
    nodes = int(trainer.get("num_nodes") or 1)
    ranks = nodes * _num_devices(trainer.get("devices"))
    strategy: Any = trainer.get("strategy")
    is_sharded = strategy == NAME
    replicas = 1
    if is_component(strategy):
        kind = import_target(strategy["_target_"], setting="trainer.strategy")
        is_sharded = isinstance(kind, type) and issubclass(kind, FSDP2Strategy)
        replicas = int(strategy.get("num_replicas", 1))
    if not is_sharded:
        return Layout(num_ranks=ranks, num_nodes=nodes, num_replicas=ranks)
    check_replicas(replicas, ranks)
    return Layout(num_ranks=ranks, num_nodes=nodes, num_replicas=replicas, is_sharded=True)


def _num_devices(asked: object) -> int:
    """Return how many devices a node has, in any of Lightning's ways to say it."""
    if isinstance(asked, list | tuple):
        return len(asked)
    words = str(asked).strip()
    if "," in words:
        return len([each for each in words.split(",") if each.strip()])
    if words in ("auto", "-1", "None"):
        return max(1, torch.cuda.device_count())
    if not words.isdigit() or int(words) < 1:
        raise ConfigError(f"trainer.devices={asked!r}: expected a number above 0, a list of devices, or auto")
    return int(words)


# -- words -------------------------------------------------------------------------------------------------------------


def describe(setup: Setup, device_bytes: int | None) -> Result:
    """Return the estimate as numbers, in bytes; for a known device also what fits, and the nearest settings that do."""
    memory = rank_memory(setup)
    result: Result = {
        "ranks": setup.layout.num_ranks,
        "shards": setup.layout.num_shards,
        "bytes_per_rank": dict(memory.parts),
        "total_bytes": memory.total,
        "backwards_per_step": num_backwards(setup),
        "sent_bytes_per_step": asdict(traffic(setup)),
    }
    if setup.is_apart and setup.engine is not None:
        result["bytes_per_worker"] = setup.engine.parts
    if device_bytes is not None:
        missing = missing_bytes(setup, device_bytes)
        result |= {"device_bytes": device_bytes, "fits": missing <= 0, "nearest": nearest(setup, device_bytes)}
        if "bytes_per_worker" in result:
            result["worker_fits"] = sum(result["bytes_per_worker"].values()) <= device_bytes
    return result


def describe_dry_run(setup: Setup, device_bytes: int | None) -> Result:
    """Return the estimate of a run whose settings have been found to be right; the first rank prints it."""
    result = describe(setup, device_bytes)
    if is_first_rank():
        show(result)
        say("Nothing is wrong with the settings; this was a dry run")
    return result


def show(result: Result) -> None:
    """Print the estimate for people."""
    ranks, shards = result["ranks"], result["shards"]
    spread = f", weights in {shards} parts" if shards > 1 else ""
    _table(f"Each of {ranks} rank{'s' * (ranks > 1)}{spread}", result["bytes_per_rank"], result["total_bytes"])
    if "bytes_per_worker" in result:
        worker = result["bytes_per_worker"]
        _table("Each GPU of a worker, at least", worker, sum(worker.values()))
    sent = {name.replace("_", " "): size for name, size in result["sent_bytes_per_step"].items()}
    if any(sent.values()):
        parts = ", ".join(f"{name} {in_gib(size)}" for name, size in sent.items() if size)
        say(f"Sent by a rank in a step of up to {result['backwards_per_step']} backwards, in GiB: {parts}")
    if "fits" not in result:
        say("The memory of the device is not known: --device-gib names it, and tells what fits")
        return
    device, spare = result["device_bytes"], result["device_bytes"] - result["total_bytes"]
    if result["fits"]:
        say(f"It fits a device of {in_gib(device)} GiB, with {in_gib(spare)} to spare")
    else:
        say(f"It does not fit a device of {in_gib(device)} GiB, by {in_gib(-spare)}; {advice(result['nearest'])}")
    if not result.get("worker_fits", True):
        missing = in_gib(sum(result["bytes_per_worker"].values()) - device)
        say(
            f"A worker does not fit one of that size, by {missing}; backend.engine=sglang with more tensor_parallel divides it among GPUs"
        )


def _table(title: str, parts: Mapping[str, int], total: int) -> None:
    sizes = {name: size for name, size in parts.items() if size} | {"total": total}
    rows = [(name.replace("_", " "), in_gib(size)) for name, size in sizes.items()]
    print_table([title, "GiB"], rows, left=[title])


def in_gib(size: int) -> str:
    """Return bytes as words in GiB, with three digits or more."""
    return f"{size / GIB:,.2f}" if abs(size) < 10 * GIB else f"{size / GIB:,.1f}"
