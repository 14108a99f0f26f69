"""The engines at a backend's addresses: servers that run already, or those behind a router."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

from rhymerl.backends.remote.client import Client
from rhymerl.config import construct
from rhymerl.errors import BackendError, ConfigError

_HEALTH_S = 60.0
_RANK = re.compile(r"@\d+$")  # behind the address, where a router tells an engine's data-parallel ranks apart


def engines_at(addresses: Sequence[Client]) -> list[Client]:
    """Return the engines at the addresses, each router replaced by its engines.

    Requests go to a router's engines and not through it: new weights have to reach each of them anyway, and routers
    drop what they do not know of a request. Raises ConfigError for one that is named twice, BackendError when an
    address does not answer.
    """
    engines = [engine for address in addresses for engine in _behind(address)]
    urls = [engine.url for engine in engines]
    for twice in {url for url in urls if urls.count(url) > 1}:
        raise ConfigError(f"backend.url: expected each SGLang server once; {twice} is there more often")
    try:
        with ThreadPoolExecutor(len(engines)) as threads:
            list(threads.map(lambda engine: engine.get("/health", timeout_s=_HEALTH_S), engines))
    except BackendError as error:
        raise BackendError(f"backend.url={[each.url for each in addresses]}: {error}") from error
    return engines


def _behind(address: Client) -> list[Client]:
    """Return a router's engines, in the order of their addresses; a server is its own engine."""
    listed = _listed(address)
    if listed is None:
        return [address]
    for engine in listed:
        if engine.get("worker_type", "regular") != "regular":
            raise ConfigError(
                f"backend.url={address.url!r}: expected a router of servers that read prompts and answer them; "
                f"{engine['url']} is for {engine['worker_type']} only"
            )
    if not listed:
        raise BackendError(f"backend.url={address.url!r}: the router there has no SGLang servers yet")
    return [
        construct(Client.at, {"url": url, "api_key": address.api_key}, key="backend")
        for url in sorted({_RANK.sub("", engine["url"]).rstrip("/") for engine in listed})
    ]


def _listed(address: Client) -> Sequence[Mapping[str, Any]] | None:
    """Return what a router says of its engines; older routers only know their addresses. None where no router is."""
    answer = address.get_if_known("/workers")
    if isinstance(answer, Mapping) and isinstance(answer.get("workers"), list):
        return cast(Sequence[Mapping[str, Any]], answer["workers"])
    answer = address.get_if_known("/list_workers")
    if isinstance(answer, Mapping) and isinstance(answer.get("urls"), list):
        return [{"url": url} for url in answer["urls"]]
    return None
