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
from rhymerl.errors import ConfigError

_log = logging.getLogger(__name__)
_LOSSY = ("speculative_accept_threshold_single", "speculative_accept_threshold_acc")


def tokens_a_pass(engine: Client, settings: SessionSettings, drafter: Drafter) -> int:
    """Return how many tokens each request has in a pass, its last one included: 1 without drafts.

    Raises ConfigError for a server whose drafts change what is sampled, or that is not what the settings say. Which drafter it has
    the server does not tell: a warning says that it is not the run's.
    """
    info = engine.get_if_known("/server_info")
    if not isinstance(info, Mapping):  # it does not say
        return settings.n
    for wrong in _faults(info, settings):
        raise ConfigError(f"backend.url={engine.url!r}: the server there has {wrong}")
    found = int(info.get("speculative_num_draft_tokens") or 1) if info.get("speculative_algorithm") else 1
    if found - 1 not in settings.allowed:
        raise ConfigError(
            f"backend.url={engine.url!r}: the server there verifies {found - 1} draft nodes of a request; expected {settings.allowed}, "
            f"as {settings.allowed.setting} says; `rhymerl sglang-args backend.nodes=…` starts one"
        )
    _warn_of_drafter(engine, found - 1, drafter)
    return found


def _warn_of_drafter(engine: Client, nodes: int, drafter: Drafter) -> None:
    """Say that the run's drafter is not the one that drafts, unless neither drafts at all."""
    if nodes == 0 and isinstance(drafter, NoDrafter):
        return
    does = (
        f"drafts with the drafter that it was started with, {nodes} nodes of a request" if nodes else "drafts nothing"
    )
    _log.warning(
        "the SGLang server at %s %s; drafter=%s of this run is not used there",
        engine.url,
        does,
        type(innermost(drafter)).__name__,
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
    if settings.release_memory and not info.get("enable_memory_saver", True):
        yield "no --enable-memory-saver, so backend.release_memory=true would free nothing"
