"""Verification of draft trees against known tokens: recorded ones, or those that an engine has sampled since."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from rhymerl.compiled import compiled
from rhymerl.drafts import DraftBatch
from rhymerl.types import BoolArray, IndexArray, IntArray


class TreeWalk(NamedTuple):
    """What was met on the way: R = requests, N = nodes."""

    accepted: BoolArray  # [N] the node's token is the next one
    reached: BoolArray  # [N] the walk came to the node's parent, and there was a next token
    num_accepted: IndexArray  # [R]


def walk(drafts: DraftBatch, tokens: Sequence[IntArray]) -> TreeWalk:
    """Follow each request's `tokens` [R] down its tree, as far as they go."""
    num_nodes, num_requests = len(drafts.token_ids), len(drafts)
    found = TreeWalk(
        accepted=np.zeros(num_nodes, np.bool_),
        reached=np.zeros(num_nodes, np.bool_),
        num_accepted=np.zeros(num_requests, np.int64),
    )
    starts = np.concatenate([[0], np.cumsum([len(each) for each in tokens], dtype=np.int64)])
    joined = np.concatenate([*tokens, np.empty(0, np.int32)])
    _walk(drafts.token_ids, drafts.parents, drafts.starts, joined, starts, found)
    return found


@compiled
def _walk(
    token_ids: IntArray,
    parents: IntArray,
    starts: IndexArray,
    tokens: IntArray,
    token_starts: IndexArray,
    found: TreeWalk,
) -> None:
    """Accept by the rule of `_accept` in verify.py, where all tokens are known."""
    for r in range(len(found.num_accepted)):
        first, at = starts[r], -1
        for k in range(token_starts[r], token_starts[r + 1]):
            met = -1
            for node in range(first, starts[r + 1]):
                if parents[node] == at:
                    found.reached[node] = True
                    if token_ids[node] == tokens[k]:
                        met = node
            if met < 0:
                break
            found.accepted[met] = True
            found.num_accepted[r] += 1
            at = met - first
