"""The experts that computed each cached token: like its keys and values they are stored by slot."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from rhymerl.models.routing import has_unread_routers, routed, routers_of
from rhymerl.replayed import RouteArray
from rhymerl.types import IndexArray

_log = logging.getLogger("rhymerl")


class RouteStore:
    """Routes by slot, on the model's device. A slot that goes back takes its token's with it.

    So rejected nodes leave nothing. Of a model without experts nothing is stored.
    """

    def __init__(self, model: nn.Module, num_slots: int) -> None:
        self._name = type(model).__name__
        self._routers = routers_of(model)
        if has_unread_routers(model):
            self._warn()
        self._num_slots = num_slots
        self._routes: Tensor | None = None  # [num_slots, layers, k] 1 + each expert's number, from the first pass on
        self.known: RouteArray | None = None  # [N, layers, k] experts that the next pass takes; 0 = routers choose

    def __bool__(self) -> bool:
        """Return whether passes say experts."""
        return self._routes is not None

    @contextmanager
    def noted(self, slots: Tensor) -> Iterator[None]:
        """Context of a pass over tokens that get these slots."""
        if not self._routers:
            yield
            return
        known, self.known = self.known, None
        with routed(self._routers, None if known is None else torch.from_numpy(known).to(slots.device)) as routing:
            yield
        if len(routing.chosen) < len(self._routers):
            self._warn()
            self._routers = []
            return
        chosen = torch.stack([routing.chosen[layer] for layer in range(len(self._routers))], 1) + 1
        if self._routes is None:
            dtype = torch.uint8 if routing.num_experts < 256 else torch.int16
            self._routes = torch.zeros(self._num_slots, *chosen.shape[1:], dtype=dtype, device=slots.device)
        self._routes[slots] = chosen.to(self._routes.dtype)

    def _warn(self) -> None:
        _log.warning(
            "%s: its experts are chosen by something that is not read, so no update can take the same", self._name
        )

    def at(self, slots: IndexArray) -> RouteArray:
        """Return the routes of the tokens in these slots, [n, layers, k]."""
        assert self._routes is not None
        found: RouteArray = self._routes[torch.from_numpy(slots).to(self._routes.device)].cpu().numpy()
        return found

    def blank(self, count: int) -> RouteArray:
        """Return routes of so many tokens, none of which is known."""
        like = self.at(np.empty(0, np.int64))
        return np.zeros((count, *like.shape[1:]), like.dtype)
