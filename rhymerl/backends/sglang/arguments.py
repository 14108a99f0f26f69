"""The command line of a server, from the backend's settings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rhymerl.errors import ConfigError

_OURS = {  # set here, by settings of their own
    "model_path": "model.path",
    "host": "backend.url",
    "port": "backend.url",
    "dtype": "backend.dtype",
    "tp_size": "backend.tensor_parallel",
    "tensor_parallel_size": "backend.tensor_parallel",
    "tp": "backend.tensor_parallel",
    "max_running_requests": "backend.max_running",
    "speculative_algorithm": "drafter",
    "speculative_num_draft_tokens": "backend.nodes",
}
_COPIES = ("dp", "dp_size", "data_parallel_size")  # each would read the one drafter's news
_AS_IT_IS = {  # with another value our trees would be verified as something else, or not at all
    "speculative_ngram_max_bfs_breadth": "trees would be verified as chains",
    "pp_size": "pipeline stages would draft each for itself",
    "pipeline_parallel_size": "pipeline stages would draft each for itself",
}
_OF_ONE = ("base_gpu_id", "dist_init_addr", "nccl_port")  # engines of one node cannot have them in common
_LOSSY = ("speculative_accept_threshold_single", "speculative_accept_threshold_acc")


def check(arguments: Mapping[str, Any]) -> None:
    """Raise ConfigError for an argument that is ours to set, or with which drafts would change what is drawn."""
    for name, value in arguments.items():
        plain = name.replace("-", "_")
        if plain in _OURS:
            raise ConfigError(f"backend.arguments.{name}={value!r}: is set by {_OURS[plain]}")
        if plain in _COPIES and value not in (None, 1):
            raise ConfigError(
                f"backend.arguments.{name}={value!r}: expected 1; every rank of the trainer has its own engine"
            )
        if plain in _AS_IT_IS:
            raise ConfigError(f"backend.arguments.{name}={value!r}: cannot be set, because {_AS_IT_IS[plain]}")
        if plain in _LOSSY and value not in (None, 1.0):
            raise ConfigError(f"backend.arguments.{name}={value!r}: expected 1.0; below it drafts change what is drawn")


def check_for_ranks(arguments: Mapping[str, Any]) -> None:
    """Raise ConfigError for an argument that only one engine can have, where every rank starts one."""
    for name, value in arguments.items():
        if name.replace("-", "_") in _OF_ONE:
            raise ConfigError(
                f"backend.arguments.{name}={value!r}: cannot be the same for all ranks, of which each has its own engine"
            )


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
    """As typed behind `python -m sglang.launch_server`; `n` tokens a request and pass, 1 without drafts."""
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
