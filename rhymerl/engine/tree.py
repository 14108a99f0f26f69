"""Draft trees of a whole pass as packed arrays: checks and depths. R = requests, N = nodes, in the order of `DraftBatch`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from rhymerl.compiled import compiled
from rhymerl.drafters.batches import keep_nodes, tidied
from rhymerl.engine.ragged import IndexArray
from rhymerl.types import DraftBatch, RolloutRequest

if TYPE_CHECKING:
    from rhymerl.types import IntArray

_TOO_MANY, _UNKNOWN_TOKEN, _ORDER, _TWINS = 1, 2, 3, 4


def no_drafts(num_requests: int) -> DraftBatch:
    """Return empty drafts for all requests."""
    return DraftBatch(
        token_ids=np.empty(0, np.int32),
        parents=np.empty(0, np.int32),
        starts=np.zeros(num_requests + 1, np.int64),
        scores=np.empty(0),
        match_length=np.zeros(num_requests, np.int32),
        sources=np.empty(0, np.int8),
    )


def sound(
    drafts: DraftBatch,
    requests: Sequence[RolloutRequest],
    *,
    limits: IntArray,
    vocabulary: int,
    complain: Callable[[str, int], None],
) -> DraftBatch:
    """Return the drafts without malformed ones; `complain` is told what was malformed, and for how many requests."""
    try:
        drafts = tidied(drafts, len(requests))
    except ValueError as error:
        complain(f"a bad batch of drafts: {error}", len(requests))
        return no_drafts(len(requests))
    problems = problems_of(drafts, limits=limits, vocabulary=vocabulary)
    if not problems:
        return drafts
    worst = min(problems)
    complain(f"a bad draft for request {requests[worst].id}: {problems[worst]}", len(problems))
    return keep_nodes(drafts, ~np.isin(drafts.requests, list(problems)))


def problems_of(drafts: DraftBatch, *, limits: IntArray, vocabulary: int) -> dict[int, str]:
    """Return why a request's draft is no tree of at most `limits` [R] known tokens, by request; empty when all are fine."""
    codes = np.zeros(len(drafts), np.int64)
    _examine(drafts.token_ids, drafts.parents, drafts.starts, limits, vocabulary, codes)
    wrong = {r: _words(drafts, r, int(codes[r]), limits, vocabulary) for r in np.flatnonzero(codes).tolist()}
    return {**drafts.problems, **wrong}


def _words(drafts: DraftBatch, r: int, code: int, limits: IntArray, vocabulary: int) -> str:
    return {
        _TOO_MANY: f"{drafts.counts[r]} nodes, the budget is {limits[r]}",
        _UNKNOWN_TOKEN: f"a token id outside the vocabulary (0 to {vocabulary - 1})",
        _ORDER: "a parent that does not come before its child",
        _TWINS: "two siblings with the same token",
    }[code]


@compiled
def _examine(
    token_ids: IntArray, parents: IntArray, starts: IndexArray, limits: IntArray, vocabulary: int, codes: IndexArray
) -> None:
    for r in range(len(codes)):
        first, end = starts[r], starts[r + 1]
        if end - first > limits[r]:
            codes[r] = _TOO_MANY
            continue
        for node in range(first, end):
            if token_ids[node] < 0 or token_ids[node] >= vocabulary:
                codes[r] = _UNKNOWN_TOKEN
            elif parents[node] < -1 or parents[node] >= node - first:
                codes[r] = _ORDER
            for other in range(first, node):
                if parents[other] == parents[node] and token_ids[other] == token_ids[node]:
                    codes[r] = max(codes[r], _TWINS)


def depths(drafts: DraftBatch) -> IndexArray:
    """Return how many tokens lead from the context to each node, [N], from 1."""
    depth = np.empty(len(drafts.parents), np.int64)
    _measure(drafts.parents, drafts.starts, depth)
    return depth


@compiled
def _measure(parents: IntArray, starts: IndexArray, depth: IndexArray) -> None:
    for r in range(len(starts) - 1):
        first = starts[r]
        for node in range(first, starts[r + 1]):
            depth[node] = 1 if parents[node] < 0 else depth[first + parents[node]] + 1
