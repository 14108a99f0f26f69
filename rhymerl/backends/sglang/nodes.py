"""How many nodes an engine verifies a request: one number for its whole life, chosen when it starts."""

from __future__ import annotations

import numpy as np

from rhymerl.costs import PassCost

LARGEST = 32  # tokens a request and pass, its last token among them


def best_n(cost: PassCost, rows: int, accept_rate: float) -> int:
    """The n that makes the most tokens a second of a pass over `rows` requests, each with n tokens in it; 1 = no drafts.

    A chain of n - 1 drafted tokens, each of which is accepted with probability `accept_rate` where the one before it was,
    emits 1 + a + ... + a^(n - 1) tokens. (HistoSpec accepts 0.65 to 0.79 of its tokens, arXiv 2508.18588.)
    """
    n = np.arange(1, LARGEST + 1)
    emitted = np.cumsum(accept_rate ** (n - 1.0))
    seconds = cost.seconds(rows, rows * (n - 1), rows)
    return int(n[(emitted / seconds).argmax()])
