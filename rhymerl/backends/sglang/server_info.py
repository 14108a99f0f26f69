"""Checks of a server that was started by hand: whether it fits the trainer, and how it drafts."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

from rhymerl.backends.remote.client import Client
from rhymerl.backends.sglang.plugin.names import ALGORITHM
from rhymerl.backends.sglang.session_settings import SessionSettings
from rhymerl.drafters.base import Drafter
from rhymerl.drafters.none import NoDrafter
from rhymerl.drafters.run_ahead import innermost
from rhymerl.errors import BackendError, ConfigError

_log = logging.getLogger(__name__)
_WITHOUT_HISTORY = (
    ", and not from this run's history, which it does not take (start it as this version's `rhymerl sglang-args` says)"
)
_LOSSY = ("speculative_accept_threshold_single", "speculative_accept_threshold_acc")


def tokens_a_pass(engine: Client, settings: SessionSettings, drafter: Drafter, *, takes_history: bool = True) -> int:
    """Return how many tokens each request has in a pass, its last one included: 1 without drafts.

    Raises ConfigError for a server whose drafts change what is sampled, or that is not what the settings say;
    BackendError for what is no such server's answer, as a proxy's page. Which drafter it has the server does not tell:
    a warning says that it has to be the run's, and whether history does not get there.
    """
    info = engine.get_if_known("/server_info")
    found = settings.n
    if info is not None:
        if not isinstance(info, Mapping):
            raise BackendError(
                f"the SGLang engine at {engine.url} answered /server_info with {info!r:.100}; expected a JSON object"
            )
        for wrong in _faults(info, settings):
            raise ConfigError(f"backend.url={engine.url!r}: the server there has {wrong}")
        found = _draft_tokens(info, engine) if info.get("speculative_algorithm") else 1
        _check_drafts(engine, found - 1, settings, drafter)
    if found > 1:
        _log.warning(
            "the SGLang server at %s drafts with the drafter that it was started with%s; drafter=%s of this run has to be the same",
            engine.url,
            "" if takes_history else _WITHOUT_HISTORY,
            type(innermost(drafter)).__name__,
        )
    return found


def _draft_tokens(info: Mapping[str, Any], engine: Client) -> int:
    told = info.get("speculative_num_draft_tokens")
    if told is not None and (type(told) is not int or told < 0):
        raise BackendError(
            f"the SGLang engine at {engine.url} says speculative_num_draft_tokens={told!r:.100}; expected a count"
        )
    return told or 1


def _check_drafts(engine: Client, nodes: int, settings: SessionSettings, drafter: Drafter) -> None:
    """Raise ConfigError unless the server drafts where the run does, and as many nodes."""
    if nodes not in settings.allowed:
        raise ConfigError(
            f"backend.url={engine.url!r}: the server there verifies {nodes} draft nodes of a request; expected {settings.allowed}, "
            f"as {settings.allowed.setting} says; `rhymerl sglang-args backend.nodes=…` starts one"
        )
    if nodes and isinstance(drafter, NoDrafter):
        raise ConfigError(
            f"backend.url={engine.url!r}, drafter=none: the server there verifies {nodes} draft nodes of a request; expected the drafter "
            "that it was started with"
        )
    if not nodes and settings.allowed.exact != 0 and not isinstance(drafter, NoDrafter):
        raise ConfigError(
            f"backend.url={engine.url!r}, drafter={type(innermost(drafter)).__name__}: the server there drafts nothing; expected "
            "drafter=none, or a server that `rhymerl sglang-args` starts with this drafter"
        )


def _faults(info: Mapping[str, Any], settings: SessionSettings) -> Iterator[str]:
    drafts = info.get("speculative_algorithm")
    # SGLang's n-grams bias what is sampled; draft models would be given the policy's weights.
    if drafts not in (None, ALGORITHM):
        yield f"speculative_algorithm={drafts}; expected none, or {ALGORITHM} as rhymerl sglang-args starts it"
    for name in _LOSSY:
        if drafts and info.get(name) not in (None, 1.0):
            yield f"{name}={info[name]}, below 1 its drafts change what is sampled"
    if info.get("dp_size", 1) != 1:
        yield f"dp_size={info['dp_size']}; start as many servers instead"
    if info.get("tp_size", settings.tensor_parallel) != settings.tensor_parallel:
        yield f"tp_size={info['tp_size']}; expected backend.tensor_parallel={settings.tensor_parallel}"
    if info.get("max_running_requests", settings.max_running) != settings.max_running:
        yield f"max_running_requests={info['max_running_requests']}; expected backend.max_running={settings.max_running}"
    if settings.release_memory and not info.get("enable_memory_saver", True):
        yield "no --enable-memory-saver, so backend.release_memory=true would free nothing"
