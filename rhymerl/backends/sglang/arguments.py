"""The command line of a server, from the backend's settings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rhymerl.errors import ConfigError

_OURS = {  # set here, by settings of their own
    "model": "model.path",
    "model_path": "model.path",
    "dtype": "backend.dtype",
    "tp_size": "backend.tensor_parallel",
    "tensor_parallel_size": "backend.tensor_parallel",
    "max_running_requests": "backend.max_running",
    "speculative_algorithm": "drafter",
    "speculative_num_draft_tokens": "backend.nodes",
}
_ADDRESS = "is chosen here; `rhymerl sglang-args` takes it from backend.url"
_KEY = "cannot be set, because rhymerl's calls would be refused"
_STAGES = "cannot be set, because pipeline stages would draft each for itself"
_REFUSED = {
    **{name: f"is set by {setting}" for name, setting in _OURS.items()},
    "host": _ADDRESS,
    "port": _ADDRESS,
    "api_key": _KEY,
    "admin_api_key": _KEY,
    "config": "cannot be set, because what a file says would not be looked at here",
    "speculative_ngram_max_bfs_breadth": "cannot be set, because trees would be verified as chains",
    "nnodes": "cannot be set, because an engine's processes are this machine's",
    "pp_size": _STAGES,
    "pipeline_parallel_size": _STAGES,
}
_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
_COPIES = "expected 1; every rank of the trainer has its own engine"  # each would read the one drafter's feed
_LOSSY = "expected 1.0; below it drafts change what is sampled"
_ONE = {  # with a number other than 1
    "dp_size": _COPIES,
    "data_parallel_size": _COPIES,
    "speculative_accept_threshold_single": _LOSSY,
    "speculative_accept_threshold_acc": _LOSSY,
}
_OF_ONE_ENGINE = dict.fromkeys(
    ("base_gpu_id", "dist_init_addr", "nccl_init_addr", "nccl_port"),
    "cannot be the same for all ranks, of which each has its own engine",
)


def check(arguments: Mapping[str, Any]) -> None:
    """Raise ValueError for an argument that is ours to set, or with which drafts would change what is sampled."""
    for name, value in arguments.items():
        _refuse(name, value, _REFUSED)
        if value not in (None, 1):
            _refuse(name, value, _ONE)


def check_for_ranks(arguments: Mapping[str, Any]) -> None:
    """Raise ValueError for an argument that only one engine can have, where every rank starts one."""
    for name, value in arguments.items():
        _refuse(name, value, _OF_ONE_ENGINE)


def _refuse(name: str, value: Any, reasons: Mapping[str, str]) -> None:
    """Raise ValueError for one of those names; also for the beginning of one, which SGLang takes for the whole."""
    plain = name.replace("-", "_")
    for whole, reason in reasons.items():
        if whole.startswith(plain):
            read_as = "" if whole == plain else f", which SGLang may read as {whole}"
            raise ValueError(f"arguments.{name}={value!r}{read_as}: {reason}")


def engine_dtype(wanted: str | None, policy: str, *, on_cpu: bool) -> str:
    """Return an engine's dtype: `wanted`, else bfloat16 on a GPU, and on a CPU the policy's own if SGLang has it."""
    if wanted is not None:
        return wanted
    return "bfloat16" if not on_cpu else "float32" if policy == "float64" else policy


def of_device(kind: str, *, dtype: str, saves_memory: bool) -> dict[str, Any]:
    """Return the arguments that fit an engine to a device of kind "cpu" or "cuda".

    Raises ConfigError for float32 on a GPU: the RMS norm of SGLang's kernels (sglang-kernel 0.4.5 and 0.4.7) is for 16
    bits only.
    """
    if kind == "cpu":
        return {"device": "cpu"}
    if dtype == "float32":
        raise ConfigError(
            "backend.dtype=float32: SGLang's kernels for a GPU have no norm in float32; expected bfloat16, or null"
        )
    return {"enable_memory_saver": saves_memory}


def without_expandable_segments(environment: Mapping[str, str]) -> dict[str, str]:
    """Return torch's allocator settings but for expandable segments, which are a trainer's.

    An engine whose memory comes and goes, or that opens tensors of another process, cannot bear them.
    """
    given = {name: environment[name] for name in _ALLOCATOR if "expandable_segments" in environment.get(name, "")}
    return {
        name: ",".join(each for each in value.split(",") if not each.strip().startswith("expandable_segments"))
        for name, value in given.items()
    }


def words(
    *,
    model_path: str,
    dtype: str,
    n: int,
    max_running: int,
    tensor_parallel: int,
    algorithm: str | None,
    context_tokens: int | None,
    more: Mapping[str, Any],
) -> list[str]:
    """Return the arguments as typed behind `python -m sglang.launch_server`.

    `n` is the tokens a request and pass, 1 without drafts.
    """
    ours: dict[str, Any] = {
        "model_path": model_path,
        "dtype": dtype,
        "max_running_requests": max_running,
        "tp_size": tensor_parallel,
        "context_length": context_tokens,
        "skip_tokenizer_init": True,
    }
    if algorithm is not None and n > 1:
        ours |= {"speculative_algorithm": algorithm, "speculative_num_draft_tokens": n}
    merged = ours | {name.replace("-", "_"): value for name, value in more.items()}
    return [word for name, value in merged.items() for word in _words_of(name, value)]


def _words_of(name: str, value: Any) -> list[str]:
    flag = "--" + name.replace("_", "-")
    if value is None or value is False:
        return []
    if value is True:
        return [flag]
    if isinstance(value, Mapping):
        return [flag, json.dumps(value)]
    return [flag, *map(str, value)] if isinstance(value, list | tuple) else [flag, str(value)]
