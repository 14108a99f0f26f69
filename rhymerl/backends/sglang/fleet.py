"""The engines of one rank of the trainer: the one that it started, or those that run at its addresses already."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from rhymerl.backends.sglang.client import Client
from rhymerl.errors import ConfigError

T = TypeVar("T")


class Fleet:
    """All of them have the same weights, so it does not matter which one answers a request."""

    def __init__(self, engines: Sequence[Client]) -> None:
        self.engines = tuple(engines)

    @classmethod
    def at(cls, addresses: Sequence[Client], *, rank: int = 0, num_ranks: int = 1) -> Fleet:
        """The engines at the addresses, a router's in its place; of them every `num_ranks`-th, from `rank` on.

        Requests go to a router's engines and not through it: new weights have to reach each of them anyway, and routers drop what they
        do not know of a request. Raises ConfigError when there are fewer than ranks, BackendError when an address does not answer.
        """
        engines = [engine for address in addresses for engine in _behind(address)]
        if len(engines) < num_ranks:
            raise ConfigError(
                f"backend.url={[each.url for each in addresses]}: expected at least {num_ranks} SGLang servers, one for each rank "
                f"of the trainer; found {len(engines)}"
            )
        return cls(engines[rank::num_ranks])

    def each(self, action: Callable[[int, Client], T]) -> list[T]:
        """What `action` makes of each engine and its number, of all at the same time; raises what the first of them raises."""
        if len(self.engines) == 1:
            return [action(0, self.engines[0])]
        with ThreadPoolExecutor(len(self.engines), thread_name_prefix="rhymerl-fleet") as threads:
            return list(threads.map(action, range(len(self.engines)), self.engines))

    def post(self, path: str, content: Mapping[str, Any]) -> None:
        """To all of them. Raises BackendError as `Client.post` does."""
        self.post_each(path, [content] * len(self.engines))

    def post_each(self, path: str, contents: Sequence[Mapping[str, Any]]) -> None:
        """To each its own."""
        self.each(lambda i, engine: engine.post(path, contents[i]))


def _behind(address: Client) -> list[Client]:
    """A router's engines; a server is its own."""
    return [address]
