"""The speed-up that a budget expects by its costs."""

from __future__ import annotations

from typing import Any

import numpy as np

from rhymerl.budgets.expectation import PassTotals
from rhymerl.costs import PassCost
from rhymerl.testing import make_requests


class Reads(PassCost):
    """A pass costs 1, and as much again for each hundred keys."""

    def seconds(self, rows: Any, nodes: Any, asked: Any, *, prompt_tokens: Any = 0, seen: Any = None) -> Any:
        assert seen is not None
        return 1.0 + np.asarray(seen) / 100.0


def test_each_pass_is_weighed_with_the_keys_that_it_read():
    totals, requests = PassTotals(), make_requests(2, group_size=1)
    for request in requests:
        totals.enter(request)
    totals.num_passes = 1
    totals.asked.append((2, 2, 2, 0, 400))
    totals.saved.append((requests, np.array([1, 1])))
    for request in requests:
        totals.leave(request)
    found = totals.speedup(Reads())
    # Without drafts two passes, each of two rows that read a hundred keys; with them one, in which two nodes read as
    # many.
    assert (found.part, found.whole) == (2 * 3.0, 5.0)
