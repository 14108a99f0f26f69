"""The number of nodes an engine verifies per request: one number for its whole life, chosen when it starts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rhymerl.budgets.base import Budget
from rhymerl.budgets.fixed import FixedBudget
from rhymerl.budgets.goodput import GoodputBudget
from rhymerl.costs import PassCost
from rhymerl.drafters.base import Drafter
from rhymerl.drafters.none import NoDrafter
from rhymerl.errors import ConfigError

LARGEST = 32  # tokens a request and pass, its last token among them


@dataclass(frozen=True, slots=True, kw_only=True)
class AllowedNodes:
    """The numbers of draft nodes that the run's settings allow, and the setting that says so; `most` None is any."""

    least: int = 0
    most: int | None = None
    setting: str = ""

    @classmethod
    def exactly(cls, nodes: int, setting: str) -> AllowedNodes:
        return cls(least=nodes, most=nodes, setting=setting)

    @property
    def exact(self) -> int | None:
        """The only number, None where there are several."""
        return self.least if self.least == self.most else None

    def __contains__(self, nodes: int) -> bool:
        return self.least <= nodes and (self.most is None or nodes <= self.most)

    def __str__(self) -> str:
        return f"{self.most}" if self.exact is not None else f"at most {self.most}"


def allowed_nodes(drafter: Drafter, budget: Budget | None, *, nodes: int | None) -> AllowedNodes:
    """The numbers that `budget` and the setting `backend.nodes` allow.

    Raises ConfigError for a budget that is not kept by one number of nodes for all requests and passes, and for settings that
    contradict each other. GoodputBudget is the default of every run; here it is only a limit.
    """
    if budget is not None and budget.max_nodes == 0:
        return AllowedNodes.exactly(0, "budget.nodes")
    if isinstance(drafter, NoDrafter):
        return AllowedNodes()
    if type(budget) is FixedBudget:
        return _fixed(budget, nodes)
    if budget is not None and not isinstance(budget, GoodputBudget):
        raise ConfigError(
            f"budget={type(budget).__name__}: expected budget=fixed with budget.nodes, or budget=goodput; SGLang verifies the same "
            "number of nodes of every request in every pass"
        )
    most = None if budget is None else budget.max_nodes
    if nodes is None:
        return AllowedNodes(most=most, setting="budget.nodes")
    if most is not None and nodes > most:
        raise ConfigError(f"backend.nodes={nodes}: expected at most {most}, as budget.nodes says")
    return AllowedNodes.exactly(nodes, "backend.nodes")


def _fixed(budget: FixedBudget, nodes: int | None) -> AllowedNodes:
    if nodes not in (None, budget.nodes):
        raise ConfigError(
            f"budget.nodes={budget.nodes}: expected {nodes}, as backend.nodes says, or backend.nodes=null; SGLang verifies the same "
            "number of nodes of every request in every pass"
        )
    if budget.min_probability:
        raise ConfigError(
            f"budget.min_probability={budget.min_probability}: expected 0; SGLang verifies the same number of nodes of every request "
            "in every pass"
        )
    return AllowedNodes.exactly(budget.nodes, "budget.nodes")


def best_n(cost: PassCost, rows: int, accept_rate: float, *, largest: int = LARGEST) -> int:
    """The n up to `largest` that makes the most tokens a second of a pass over `rows` requests, each with n tokens in it; 1 = no drafts.

    A chain of n - 1 drafted tokens, each of which is accepted with probability `accept_rate` where the one before it was,
    emits 1 + a + ... + a^(n - 1) tokens. (HistoSpec accepts 0.65 to 0.79 of its tokens, arXiv 2508.18588.)
    """
    n = np.arange(1, largest + 1)
    emitted = np.cumsum(accept_rate ** (n - 1.0))
    seconds = cost.seconds(rows, rows * (n - 1), rows)
    return int(n[(emitted / seconds).argmax()])
