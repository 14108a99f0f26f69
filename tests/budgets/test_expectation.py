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


class Flat(PassCost):
    """Each pass costs 1."""

    def seconds(self, rows: Any, nodes: Any, asked: Any, *, prompt_tokens: Any = 0, seen: Any = None) -> Any:
        return np.ones(len(np.atleast_1d(nodes)))


def test_the_turns_of_an_episode_follow_one_another():
    """Two turns of two passes around a reply, each with a token from a draft, beside an answer of five passes."""
    totals, (episode, other) = PassTotals(), make_requests(2, group_size=1)
    totals.enter(other)
    for start, stop in ((0, 2), (3, 5)):
        totals.num_passes = start
        totals.enter(episode)
        totals.asked.append((2, 1, 1, 0, 0))
        totals.saved.append(([episode, other], np.array([1, 0])))
        totals.num_passes = stop
        totals.leave(episode)
    totals.leave(other)
    found = totals.speedup(Flat())
    assert (found.part, found.whole) == (6.0, 5.0)
