"""Nodes an engine verifies per request: the most is chosen when it starts, the number in each pass as it comes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rhymerl.budgets.base import Budget
from rhymerl.budgets.fixed import FixedBudget
from rhymerl.costs import PassCost
from rhymerl.drafters.base import Drafter
from rhymerl.drafters.none import NoDrafter
from rhymerl.errors import ConfigError

LARGEST = 32  # tokens a request and pass, its last token among them
_WIDTHS = (0, 2, 4, 8, 16)  # nodes of a request: each has CUDA graphs of its own
_ONE_NUMBER = "SGLang verifies the same number of nodes of every request in a pass"


@dataclass(frozen=True, slots=True, kw_only=True)
class AllowedNodes:
    """The numbers of draft nodes that the run's settings allow, and the setting that says so; `most` None is any."""

    least: int = 0
    most: int | None = None
    setting: str = ""

    @property
    def exact(self) -> int | None:
        return self.least if self.least == self.most else None

    def __contains__(self, nodes: int) -> bool:
        return self.least <= nodes and (self.most is None or nodes <= self.most)

    def __str__(self) -> str:
        return f"{self.most}" if self.exact is not None else f"at most {self.most}"


def allowed_nodes(drafter: Drafter, budget: Budget | None, *, nodes: int | None) -> AllowedNodes:
    """Return the numbers of nodes that `budget` and the setting `backend.nodes` allow the largest pass.

    Raises ConfigError for a budget that is not kept by one number of nodes for all requests of a pass, and for settings
    that contradict each other. Without a drafter both are of no account, as with any backend.
    """
    if isinstance(drafter, NoDrafter):
        return AllowedNodes()
    allowed = AllowedNodes()
    if budget is not None:
        widths = uniform(budget, budget.max_nodes).widths
        allowed = AllowedNodes(least=widths[0], most=widths[-1], setting="budget.nodes")
    if nodes is None:
        return allowed
    if nodes not in allowed:
        raise ConfigError(
            f"backend.nodes={nodes}: expected {allowed}, as {allowed.setting} says, or null; {_ONE_NUMBER}"
        )
    return allowed if allowed.exact is not None else AllowedNodes(most=nodes, setting="backend.nodes")


def uniform(budget: Budget, most: int) -> Budget:
    """Return the budget of an engine whose passes have at most `most` nodes of a request, the same number of each.

    Raises ConfigError for one that cannot be kept so.
    """
    can = "uniform" in vars(type(budget))
    found = (budget if most else FixedBudget(0)).uniform(widths_to(most)) if can else None
    if found is None:
        raise ConfigError(f"budget={type(budget).__name__}: expected budget=goodput, aimd or fixed; {_ONE_NUMBER}")
    return found


def widths_to(most: int) -> tuple[int, ...]:
    """Return the few numbers of nodes a pass may have, up to `most`: an engine keeps CUDA graphs for each."""
    return (*(width for width in _WIDTHS if width < most), most)


def num_sizes(n: int, budget: Budget | None) -> int:
    """Return how many sizes the passes of an engine with `n` tokens of a request at most have."""
    if n == 1 or budget is None:
        return len(widths_to(n - 1))
    return len(uniform(budget, n - 1).widths)


def best_n(cost: PassCost, rows: int, accept_rate: float, *, largest: int = LARGEST) -> int:
    """Return the n up to `largest` that makes the most tokens per second in passes over `rows` requests.

    Each request has n tokens in a pass; n = 1 means no drafts. A chain of n - 1 drafted tokens, each of which is
    accepted with probability `accept_rate` where the one before it was, emits 1 + a + ... + a^(n - 1) tokens.
    (HistoSpec accepts 0.65 to 0.79 of its tokens, arXiv 2508.18588.)
    """
    n = np.arange(1, largest + 1)
    emitted = np.cumsum(accept_rate ** (n - 1.0))
    seconds = cost.seconds(rows, rows * (n - 1), rows)
    return int(n[(emitted / seconds).argmax()])
