"""Batches of drafts: brought into the documented types, cut, and those of several drafters laid side by side."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from rhymerl.compiled import compiled
from rhymerl.types import Draft, DraftBatch

if TYPE_CHECKING:
    from rhymerl.types import BoolArray, IndexArray, IntArray

_NOTHING = Draft(token_ids=np.empty(0, np.int32), parents=np.empty(0, np.int32))


def tidied(drafts: DraftBatch, num_requests: int) -> DraftBatch:
    """Return a copy with arrays of the documented types, whatever sequences it came with.

    Raises ValueError when the arrays do not fit together, so that nobody's draft can be told.
    """
    if not isinstance(drafts, DraftBatch):
        raise ValueError(f"a {type(drafts).__name__}; expected a DraftBatch")
    tokens, parents, scores, sources, starts = (
        np.asarray(each) for each in (drafts.token_ids, drafts.parents, drafts.scores, drafts.sources, drafts.starts)
    )
    total = tokens.shape
    if (
        starts.shape != (num_requests + 1,)
        or starts[0] != 0
        or bool(np.any(np.diff(starts) < 0))
        or total != (starts[-1],)
    ):
        raise ValueError(f"starts must rise from 0 to {total} in {num_requests} steps, one a request")
    if not total == parents.shape == scores.shape == sources.shape:
        lengths = {"token_ids": total, "parents": parents.shape, "scores": scores.shape, "sources": sources.shape}
        raise ValueError(f"arrays of different lengths: {lengths}")
    if np.shape(drafts.match_length) != (num_requests,):
        raise ValueError(
            f"match_length {np.shape(drafts.match_length)} must be as long as there are requests ({num_requests})"
        )
    for name, values in (("token_ids", tokens), ("parents", parents)):
        if total != (0,) and values.dtype.kind not in "iu":
            raise ValueError(f"{name} ({values.dtype}) must be integers")
    # Copies: the drafter may use its arrays again, and compiled code wants them writeable.
    return DraftBatch(
        token_ids=np.array(tokens, np.int32),
        parents=np.array(parents, np.int32),
        starts=np.array(starts, np.int64),
        scores=np.array(scores, np.float64),
        match_length=np.array(drafts.match_length, np.int32),
        sources=np.array(sources, np.int8),
        problems=drafts.problems,
    )


def closed(drafts: DraftBatch, mask: BoolArray) -> BoolArray:
    """Return the part of `mask` [N] that is ancestor-closed: nodes all of whose ancestors are in it too."""
    found = np.array(mask, np.bool_)
    _close(found, drafts.parents, drafts.starts)
    return found


def keep_nodes(drafts: DraftBatch, mask: BoolArray) -> DraftBatch:
    """Return the nodes of the ancestor-closed part of `mask` [N], with parents renumbered."""
    if mask.all():
        return drafts
    mask = closed(drafts, mask)
    starts, parents = np.empty_like(drafts.starts), np.empty(int(mask.sum()), np.int32)
    _renumber(mask, drafts.parents, drafts.starts, starts, parents)
    return replace(
        drafts,
        token_ids=drafts.token_ids[mask],
        parents=parents,
        starts=starts,
        scores=drafts.scores[mask],
        sources=drafts.sources[mask],
    )


@compiled
def _close(mask: BoolArray, parents: IntArray, starts: IndexArray) -> None:
    for r in range(len(starts) - 1):
        for node in range(starts[r], starts[r + 1]):  # parents come first
            mask[node] &= parents[node] < 0 or mask[starts[r] + parents[node]]


@compiled
def _renumber(mask: BoolArray, parents: IntArray, starts: IndexArray, new_starts: IndexArray, new: IntArray) -> None:
    index = np.empty(len(mask), np.int32)  # of a kept node among its request's
    total = 0
    for r in range(len(starts) - 1):
        new_starts[r] = total
        for node in range(starts[r], starts[r + 1]):
            if mask[node]:
                index[node] = total - new_starts[r]
                new[total] = parents[node] if parents[node] < 0 else index[starts[r] + parents[node]]
                total += 1
    new_starts[len(starts) - 1] = total


def placed(drafts: DraftBatch, indices: IndexArray, num_requests: int) -> DraftBatch:
    """Return what was proposed for the requests at the ascending `indices`, nothing for the others of `num_requests`.

    A batch that does not fit together is a problem of each request that it was for.
    """
    try:
        drafts = tidied(drafts, len(indices))
    except ValueError as error:
        nothing = DraftBatch.pack([_NOTHING] * len(indices))
        drafts = replace(nothing, problems=dict.fromkeys(range(len(indices)), str(error)))
    return drafts.spread(indices, num_requests)


def merged(one: DraftBatch, other: DraftBatch) -> DraftBatch:
    """Return one batch of two over the same requests, of which each has nodes in one of them at most."""
    order = np.argsort(np.concatenate([one.requests, other.requests]), kind="stable")
    return DraftBatch(
        token_ids=np.concatenate([one.token_ids, other.token_ids])[order],
        parents=np.concatenate([one.parents, other.parents])[order],
        starts=one.starts + other.starts,
        scores=np.concatenate([one.scores, other.scores])[order],
        match_length=np.maximum(one.match_length, other.match_length),
        sources=np.concatenate([one.sources, other.sources])[order],
        problems={**one.problems, **other.problems},
    )
