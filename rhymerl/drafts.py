"""Drafts: guesses of the next tokens as trees, single or packed over a running batch; checks, depths and parts.

K = draft nodes, R = requests of a batch, N = draft nodes of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from rhymerl.compiled import compiled
from rhymerl.types import BoolArray, FloatArray, IndexArray, IntArray, RolloutRequest

_TOO_MANY, _UNKNOWN_TOKEN, _ORDER, _TWINS = 1, 2, 3, 4
_OF_NODES: dict[str, Any] = {"token_ids": np.int32, "parents": np.int32, "scores": np.float64, "sources": np.int8}


class DraftSource(IntEnum):
    """The origin of a draft node; HISTORY + a is an answer that is `a` epochs older than the newest."""

    UNKNOWN = -1
    OWN = 0  # the request's own prompt and tokens
    SIBLING = 1  # another answer to the same prompt that is being generated now
    RUN_AHEAD = 2
    OTHER = 3  # an answer to another prompt
    HISTORY = 4


NOT_DRAFTED = -2  # in the place of a DraftSource: of a token that no draft had


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A guess of the next tokens as a tree: parents come first, siblings are distinct.

    `Draft(token_ids=[5, 7, 9], parents=[-1, 0, 0])` guesses 5, then 7 or 9.
    """

    token_ids: IntArray  # [K]
    parents: IntArray  # [K], -1 <= parents[i] < i; -1 = directly after the context
    scores: FloatArray | None = None  # [K] path probability, non-increasing along a path
    match_length: int = 0  # tokens of context that the guess rests on
    sources: IntArray | None = None  # [K] DraftSource of each node, for metrics

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftBatch:
    """The drafts of a running batch, packed: request r owns the nodes starts[r]:starts[r + 1].

    Parents count from the request's own first node: `parents=[-1, 0, -1], starts=[0, 2, 3]` is a path of two and a
    single node.
    """

    token_ids: IntArray  # [N]
    parents: IntArray  # [N] -1 = directly after the context
    starts: IndexArray  # [R + 1]
    scores: FloatArray  # [N] path probability, NaN where the drafter gave none
    match_length: IntArray  # [R]
    sources: npt.NDArray[np.int8]  # [N] DraftSource
    problems: Mapping[int, str] = field(default_factory=dict)  # by r: why a draft could not be packed; it is empty here
    _requests: IndexArray | None = field(default=None, init=False, repr=False, compare=False)

    def __len__(self) -> int:
        return len(self.starts) - 1

    @classmethod
    def pack(cls, drafts: Sequence[Draft]) -> DraftBatch:
        """Return one batch of single drafts. Never raises: a draft that is no two lists of ints goes to `problems`."""
        given: Sequence[object] = drafts  # they come from anybody's drafter
        problems = {r: problem for r, draft in enumerate(given) if (problem := _packing_problem(draft))}
        usable = [draft for r, draft in enumerate(drafts) if r not in problems]
        counts = [0 if r in problems else len(draft) for r, draft in enumerate(drafts)]
        return cls(
            token_ids=_joined([draft.token_ids for draft in usable]),
            parents=_joined([draft.parents for draft in usable]),
            starts=np.cumsum([0, *counts], dtype=np.int64),
            scores=_joined_or([(draft.scores, len(draft)) for draft in usable], np.nan, np.float64),
            match_length=np.array([draft.match_length if isinstance(draft, Draft) else 0 for draft in given], np.int32),
            sources=_joined_or([(draft.sources, len(draft)) for draft in usable], -1, np.int8),
            problems=problems,
        )

    @property
    def counts(self) -> IndexArray:
        """Return the number of nodes of each request, [R]."""
        return self.starts[1:] - self.starts[:-1]

    @property
    def requests(self) -> IndexArray:
        """Return which request each node belongs to, [N]."""
        if self._requests is None:
            object.__setattr__(self, "_requests", np.repeat(np.arange(len(self)), self.counts))
        assert self._requests is not None
        return self._requests

    def draft(self, r: int) -> Draft:
        """Return the draft of request r; scores and sources are None where the batch has none."""
        nodes = slice(int(self.starts[r]), int(self.starts[r + 1]))
        scores, sources = self.scores[nodes], self.sources[nodes]
        return Draft(
            token_ids=self.token_ids[nodes],
            parents=self.parents[nodes],
            scores=None if np.isnan(scores).all() else scores,
            match_length=int(self.match_length[r]),
            sources=None if (sources == -1).all() else sources.astype(np.int32),
        )

    def scatter(self, indices: IndexArray, num_requests: int) -> DraftBatch:
        """Return these drafts at the ascending `indices` [R] among `num_requests` requests, nothing for the others."""
        if len(indices) == num_requests:
            return self
        counts, match_length = np.zeros(num_requests, np.int64), np.zeros(num_requests, np.int32)
        counts[indices], match_length[indices] = self.counts, self.match_length
        problems = {int(indices[r]): problem for r, problem in self.problems.items()}
        return replace(
            self, starts=np.concatenate([[0], np.cumsum(counts)]), match_length=match_length, problems=problems
        )


def _packing_problem(draft: object) -> str | None:
    """Return why the arrays of a draft cannot stand side by side with others', None when they can."""
    if not isinstance(draft, Draft):
        return f"a {type(draft).__name__}; expected a rhymerl.Draft"
    try:
        tokens, parents = np.asarray(draft.token_ids), np.asarray(draft.parents)
    except ValueError as error:  # lists of unequal lists
        return f"token_ids and parents must be two lists of one length ({error})"
    if tokens.ndim != 1 or tokens.shape != parents.shape:
        return f"token_ids {tokens.shape} and parents {parents.shape} must be two lists of one length"
    if len(tokens) and not (tokens.dtype.kind in "iu" and parents.dtype.kind in "iu"):
        return f"token_ids ({tokens.dtype}) and parents ({parents.dtype}) must be integers"
    for name, values in (("scores", draft.scores), ("sources", draft.sources)):
        if values is not None and np.shape(values) != tokens.shape:
            return f"{name} {np.shape(values)} must be as long as token_ids {tokens.shape}"
    return None


def _joined(parts: Sequence[IntArray]) -> IntArray:
    """Return an int32 array, with values clipped to int32's ends, so that wrong ones stay out of range."""
    whole = np.concatenate(parts) if parts else np.empty(0, np.int32)
    limits = np.iinfo(np.int32)
    return whole if whole.dtype == np.int32 else whole.clip(limits.min, limits.max).astype(np.int32)


def _joined_or(parts: Sequence[tuple[npt.NDArray[Any] | None, int]], missing: float, dtype: npt.DTypeLike) -> Any:
    """Return one array of the given arrays; None stands for so many times `missing`."""
    if all(values is None for values, _ in parts):
        return np.full(sum(count for _, count in parts), missing, dtype)
    return np.concatenate(
        [np.full(count, missing, dtype) if values is None else np.asarray(values, dtype) for values, count in parts]
    )


def tidied(drafts: DraftBatch, num_requests: int) -> DraftBatch:
    """Return a copy with arrays of the documented types, whatever sequences it came with.

    Raises ValueError when the arrays do not fit together, so that nobody's draft can be told.
    """
    if not isinstance(drafts, DraftBatch):
        raise ValueError(f"a {type(drafts).__name__}; expected a DraftBatch")
    nodes = {name: np.asarray(getattr(drafts, name)) for name in _OF_NODES}
    starts, total = np.asarray(drafts.starts), nodes["token_ids"].shape
    if (
        starts.shape != (num_requests + 1,)
        or starts[0] != 0
        or bool(np.less(starts[1:], starts[:-1]).any())
        or total != (starts[-1],)
    ):
        raise ValueError(f"starts must rise from 0 to {total} in {num_requests} steps, one a request")
    if any(each.shape != total for each in nodes.values()):
        lengths = {name: each.shape for name, each in nodes.items()}
        raise ValueError(f"arrays of different lengths: {lengths}")
    if np.shape(drafts.match_length) != (num_requests,):
        raise ValueError(
            f"match_length {np.shape(drafts.match_length)} must be as long as there are requests ({num_requests})"
        )
    for name in ("token_ids", "parents"):
        if total != (0,) and nodes[name].dtype.kind not in "iu":
            raise ValueError(f"{name} ({nodes[name].dtype}) must be integers")
    # Copies: the drafter may use its arrays again, and compiled code wants them writeable.
    return DraftBatch(
        **{name: np.array(nodes[name], dtype) for name, dtype in _OF_NODES.items()},
        starts=np.array(starts, np.int64),
        match_length=np.array(drafts.match_length, np.int32),
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
    kept = {name: getattr(drafts, name)[mask] for name in ("token_ids", "scores", "sources")}
    return replace(drafts, **kept, parents=parents, starts=starts)


def within_turns(drafts: DraftBatch, requests: Sequence[RolloutRequest]) -> DraftBatch:
    """Return the drafts up to the end of a turn: in the history a reply follows it, which no policy samples.

    Where requests have several sets of stop tokens, a token of any of them ends a turn.
    """
    stops = {token for each in {request.sampling.stop_token_ids for request in requests} for token in each}
    is_end = np.isin(drafts.token_ids, list(stops))
    parent = drafts.starts[drafts.requests] + drafts.parents
    return keep_nodes(drafts, (drafts.parents < 0) | ~is_end[parent])


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
    """Return the drafts for requests at the ascending `indices`, and empty ones for the others of `num_requests`.

    A batch that does not fit together is a problem of each request that it was for.
    """
    try:
        drafts = tidied(drafts, len(indices))
    except ValueError as error:
        drafts = replace(no_drafts(len(indices)), problems=dict.fromkeys(range(len(indices)), str(error)))
    return drafts.scatter(indices, num_requests)


def merge_drafts(one: DraftBatch, other: DraftBatch) -> DraftBatch:
    """Merge two batches over the same requests, each of which has nodes in at most one batch."""
    order = np.argsort(np.concatenate([one.requests, other.requests]), kind="stable")
    pairs = {name: [getattr(one, name), getattr(other, name)] for name in _OF_NODES}
    nodes: dict[str, Any] = {name: np.concatenate(pair)[order] for name, pair in pairs.items()}
    return DraftBatch(
        **nodes,
        starts=one.starts + other.starts,
        match_length=np.maximum(one.match_length, other.match_length),
        problems={**one.problems, **other.problems},
    )


def no_drafts(num_requests: int) -> DraftBatch:
    """Return empty drafts for all requests."""
    nodes: dict[str, Any] = {name: np.empty(0, dtype) for name, dtype in _OF_NODES.items()}
    starts, match_length = np.zeros(num_requests + 1, np.int64), np.zeros(num_requests, np.int32)
    return DraftBatch(**nodes, starts=starts, match_length=match_length)


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
    """Return, by request, why a draft is no tree of at most `limits` [R] known tokens; empty when all are valid."""
    codes = np.zeros(len(drafts), np.int64)
    if not _examine(drafts.token_ids, drafts.parents, drafts.starts, limits, vocabulary, codes):
        return dict(drafts.problems)
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
) -> bool:
    """Write a code for each draft that is malformed; returns whether any is."""
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
    return bool(codes.any())


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
