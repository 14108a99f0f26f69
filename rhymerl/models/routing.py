"""The experts that a model's routers choose: read from a pass, or given to it.

Routers differ in what they make of their scores, but all of them choose by a top-k over the experts. That call is what
is read or answered here, so weights of given experts are computed as the model computes those of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from rhymerl.replayed import RouteArray
from rhymerl.types import FloatArray

_NAMES = ("gate", "router")  # of a router, beside its `experts`


@dataclass(frozen=True, slots=True)
class Router:
    """The module of a layer that chooses among so many experts."""

    module: nn.Module
    num_experts: int  # at least


def routers_of(model: nn.Module) -> list[Router]:
    """Return the routers of a model in the order of its layers; none of a model without experts."""
    found: list[Router] = []
    for block in model.modules():
        experts: Any = getattr(block, "experts", None)
        router = next((getattr(block, name) for name in _NAMES if hasattr(block, name)), None)
        owner = next((each for each in (experts, router) if hasattr(each, "num_experts")), None)
        if isinstance(experts, nn.Module) and isinstance(router, nn.Module) and owner is not None:
            found.append(Router(router, int(owner.num_experts)))
    return found


def has_unread_routers(model: nn.Module) -> bool:
    """Return whether the model has routers in transformers' words, but none in those of `routers_of`."""
    said = (getattr(model, "_can_record_outputs", None) or {}).get("router_logits", [])
    kinds = tuple(each.target_class for each in (said if isinstance(said, list) else [said]))
    return not routers_of(model) and any(isinstance(each, kinds) for each in model.modules())


def has_balance_loss(model: nn.Module) -> bool:
    """Return whether transformers has a loss for this model that balances its experts."""
    modules = [sys.modules[kind.__module__] for kind in type(model).__mro__]
    return bool(routers_of(model)) and any(hasattr(each, "load_balancing_loss_func") for each in modules)


def expert_loads(routes: RouteArray, routers: Sequence[Router]) -> FloatArray:
    """Return the weights of the experts' probabilities, [E], given the experts that computed tokens, [N, layers, k].

    The loss is that of transformers, E * sum over e of f_e * P_e: f_e is the number of experts e among the k of a token
    in a layer, and P_e the probability of e, both means over tokens and layers. Weights are E * f_e / layers, so a
    token's part is a sum over its layers. With equal loads it is k. Source: arXiv 2101.03961, eq. 4 to 6.
    """
    counts = np.bincount(routes.ravel(), minlength=1 + max(each.num_experts for each in routers))[1:]
    _, layers, chosen = routes.shape
    loads: FloatArray = counts * (len(counts) * chosen / layers / max(1, counts.sum()))
    return loads


class Routing:
    """The choices in a pass over N tokens.

    `known` [N, layers, k] has 1 + the number of each expert, and 0 where the router chooses. With `replays` a pass
    takes these experts; else they are only compared with what routers choose. `loads` are of `expert_loads`.
    """

    def __init__(self, known: Tensor | None, *, replays: bool, loads: FloatArray | None = None) -> None:
        self.chosen: dict[int, Tensor] = {}  # [N, k] by layer, what the pass took
        self.num_experts = 0  # of the layer with the most
        self.differs: Tensor | None = None  # [N] whether a router would have chosen other experts than the known ones
        self.balance: Tensor | None = None  # [N] each token's part of the balance loss, where loads are given
        self._known = known
        self._replays = replays
        self._loads = loads

    def weigh(self, logits: Tensor) -> None:
        """Add a layer's part to the balance loss, given its router's logits, [N, E]."""
        if self._loads is not None:
            probabilities = logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
            found = (probabilities * probabilities.new_tensor(self._loads)).sum(-1)
            self.balance = found if self.balance is None else self.balance + found

    def choose(self, layer: int, scores: Tensor, own: Any) -> Any:
        """Return the scores and numbers of the experts that are taken, given those of the router itself."""
        self.num_experts = max(self.num_experts, scores.shape[1])
        if self._known is None:
            self.chosen[layer] = own.indices
            return own
        given = self._known[:, layer].long() - 1
        if given.shape != own.indices.shape:  # a choice of something else, on the way to that of experts
            return own
        is_known = given[:, :1] >= 0
        others = (is_known & (given.sort(-1).values != own.indices.sort(-1).values)).any(-1)
        self.differs = others if self.differs is None else self.differs | others
        self.chosen[layer] = torch.where(is_known, given, own.indices) if self._replays else own.indices
        return torch.return_types.topk((scores.gather(-1, self.chosen[layer]), self.chosen[layer]))


class _Chooser(TorchFunctionMode):
    """Asks a `Routing` about each top-k over the experts of a layer."""

    def __init__(self, routing: Routing, layer: int, num_experts: int) -> None:
        super().__init__()
        self.routing = routing
        self._choose = partial(routing.choose, layer)
        self._num_experts = num_experts

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        # Groups of experts, among which some models choose first, are fewer, or have a dimension more.
        if func not in (torch.topk, Tensor.topk) or args[0].ndim != 2 or args[0].shape[1] < self._num_experts:
            return found
        return self._choose(args[0], found)


@contextmanager
def routed(
    routers: Sequence[Router], known: Tensor | None = None, *, replays: bool = True, loads: FloatArray | None = None
) -> Iterator[Routing]:
    """Context of a pass, and of the backward that may compute it again, whose choices are read or given."""
    routing = Routing(known, replays=replays, loads=loads)
    before = [vars(router.module).get("forward") for router in routers]
    for layer, router in enumerate(routers):
        chooser = _Chooser(routing, layer, router.num_experts)
        vars(router.module)["forward"] = partial(_within, chooser, router.module.forward)
    try:
        yield routing
    finally:
        for router, own in zip(routers, before, strict=True):
            vars(router.module).pop("forward")
            if own is not None:
                vars(router.module)["forward"] = own


def _within(chooser: _Chooser, forward: Callable[..., Any], *args: Any, **settings: Any) -> Any:
    with chooser:
        found = forward(*args, **settings)
        chooser.routing.weigh(found[0])  # a router that chooses by itself returns its logits first
        return found
