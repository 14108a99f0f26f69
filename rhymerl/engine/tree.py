"""Draft trees as arrays: checks, depths, ancestors, look-up of children. K = nodes of one tree."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from rhymerl.engine.ragged import IndexArray
from rhymerl.types import Draft

if TYPE_CHECKING:
    from rhymerl.types import BoolArray, IntArray


def checked_draft(draft: Draft, *, budget: int, vocabulary: int, drafter: str) -> Draft:
    """The draft with int32 arrays, whatever sequences it came with.

    Raises ValueError naming the drafter when it is not a tree of at most `budget` known tokens.
    """
    tokens, parents = np.asarray(draft.token_ids), np.asarray(draft.parents)
    problem = None
    if tokens.ndim != 1 or tokens.shape != parents.shape:
        problem = f"token_ids {tokens.shape} and parents {parents.shape} must be two lists of one length"
    elif len(tokens) and not (np.issubdtype(tokens.dtype, np.integer) and np.issubdtype(parents.dtype, np.integer)):
        problem = f"token_ids ({tokens.dtype}) and parents ({parents.dtype}) must be integers"
    elif len(tokens) > budget:
        problem = f"{len(tokens)} nodes, the budget is {budget}"
    elif len(tokens) and (tokens.min() < 0 or tokens.max() >= vocabulary):
        problem = f"a token id outside the vocabulary (0 to {vocabulary - 1})"
    elif (parents < -1).any() or (parents >= np.arange(len(parents))).any():
        problem = "a parent that does not come before its child"
    elif len(np.unique(_edges(parents, tokens, vocabulary))) < len(tokens):
        problem = "two siblings with the same token"
    if problem:
        raise ValueError(f"{drafter} proposed a bad draft: {problem}")
    return replace(
        draft,
        token_ids=tokens.astype(np.int32),
        parents=parents.astype(np.int32),
        scores=None if draft.scores is None else np.asarray(draft.scores, np.float64),
        sources=None if draft.sources is None else np.asarray(draft.sources, np.int32),
    )


def _edges(parents: npt.NDArray[np.integer], tokens: npt.NDArray[np.integer], vocabulary: int) -> IndexArray:
    """One number for each (parent, token)."""
    return (parents.astype(np.int64) + 1) * vocabulary + tokens


def depths(parents: IntArray) -> IndexArray:
    """Tokens from the context to each node, [K], from 1."""
    depth = np.zeros(len(parents) + 1, np.int64)  # the last entry is the root, which index -1 reads
    for node, parent in enumerate(parents):
        depth[node] = depth[parent] + 1
    return depth[:-1]


def ancestors(parents: IntArray) -> BoolArray:
    """[K, K], True where the column is the row's node or above it."""
    count = len(parents)
    above = np.zeros((count + 1, count), np.bool_)
    for node, parent in enumerate(parents):
        above[node] = above[parent]
        above[node, node] = True
    return above[:-1]


def cut(draft: Draft, *, max_depth: int, max_nodes: int) -> Draft:
    """The part of the draft within `max_depth` and its first `max_nodes` nodes; parents stay in front."""
    keep = depths(draft.parents) <= max_depth
    keep &= np.cumsum(keep) <= max_nodes
    if keep.all():
        return draft
    place = np.append(np.cumsum(keep) - 1, -1)  # new number of each old node; -1 stays -1
    return Draft(
        token_ids=draft.token_ids[keep],
        parents=place[draft.parents[keep]].astype(np.int32),
        scores=None if draft.scores is None else draft.scores[keep],
        match_length=draft.match_length,
        sources=None if draft.sources is None else draft.sources[keep],
    )


class Children:
    """Which node carries a token below a given node, over all trees of a pass at once."""

    def __init__(self, nodes: IndexArray, parents: IndexArray, tokens: IntArray) -> None:
        """`nodes`, `parents` [K]: numbers that are unique in the pass."""
        edges = (parents << 32) | tokens.astype(np.int64)
        order = np.argsort(edges)
        self._edges, self._nodes = edges[order], nodes[order]

    def find(self, parents: IndexArray, tokens: IntArray) -> IndexArray:
        """The child of each parent with that token, or -1."""
        if len(self._edges) == 0:
            return np.full(len(parents), -1, np.int64)
        wanted = (parents << 32) | tokens.astype(np.int64)
        place = np.minimum(np.searchsorted(self._edges, wanted), len(self._edges) - 1)
        return np.where(self._edges[place] == wanted, self._nodes[place], -1)
