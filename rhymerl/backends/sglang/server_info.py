"""What a server that was started by hand says of itself: whether it fits the trainer, and how it drafts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rhymerl.backends.remote.client import Client
from rhymerl.backends.sglang.plugin.names import ALGORITHM
from rhymerl.backends.sglang.session_settings import SessionSettings
from rhymerl.errors import ConfigError

_LOSSY = ("speculative_accept_threshold_single", "speculative_accept_threshold_acc")


def tokens_a_pass(engine: Client, settings: SessionSettings) -> int:
    """How many tokens each request has in a pass, its last one among them: 1 without drafts.

    Raises ConfigError for a server whose drafts change what is sampled, or that is not what the settings say.
    """
    info = engine.get_if_known("/server_info")
    if not isinstance(info, Mapping):  # it does not say
        return settings.n
    for wrong in _faults(info, settings):
        raise ConfigError(f"backend.url={engine.url!r}: the server there has {wrong}")
    return int(info.get("speculative_num_draft_tokens") or 1) if info.get("speculative_algorithm") else 1


def _faults(info: Mapping[str, Any], settings: SessionSettings) -> Iterator[str]:
    drafts = info.get("speculative_algorithm")
    # SGLang's n-grams bias what is sampled; draft models would be given the policy's weights.
    if drafts not in (None, ALGORITHM):
        yield f"speculative_algorithm={drafts}; expected none, or {ALGORITHM} as rhymerl sglang-args starts it"
    for name in _LOSSY:
        if drafts and info.get(name) not in (None, 1.0):
            yield f"{name}={info[name]}, below 1 its drafts change what is drawn"
    if info.get("dp_size", 1) != 1:
        yield f"dp_size={info['dp_size']}; start as many servers instead"
    if info.get("tp_size", settings.tensor_parallel) != settings.tensor_parallel:
        yield f"tp_size={info['tp_size']}; expected backend.tensor_parallel={settings.tensor_parallel}"
    if settings.release_memory and not info.get("enable_memory_saver", True):
        yield "no --enable-memory-saver, so backend.release_memory=true would free nothing"
