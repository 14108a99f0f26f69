"""Drafts from what the previous policy sampled for the same request with the same noise; then another drafter's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from rhymerl.drafters.base import Drafter
from rhymerl.drafters.batches import merged, placed
from rhymerl.history.index import REACH
from rhymerl.types import Completion, Draft, DraftBatch, DraftSource, RolloutRequest, Sample

if TYPE_CHECKING:
    from rhymerl.history.records import HistoryDelta
    from rhymerl.types import IndexArray, IntArray

T = TypeVar("T")

# The rate at which tokens are right when all before them were. It is not learned here: budgets calibrate scores, and what they
# have learned is in checkpoints, so that a resumed run verifies the very nodes that the whole run did.
_RATE = 0.95


class RunAheadDrafter(Drafter):
    """Drafts a request's prefetched tokens (`RolloutRequest.prefetched`): those after its response, as one path, while all of it agrees.

    Both were sampled with the same noise, so a token is wrong only where the update has moved that very draw. After the
    first wrong token, or behind the last, `inner` drafts for the request for good, as it does for all requests without such tokens.
    """

    def __init__(self, inner: Drafter) -> None:
        self.inner = inner
        self._prefetched: dict[str, _Prefetched] = {}  # by id of a request whose response agrees so far

    # -- drafts --------------------------------------------------------------------------------------------------

    def propose(self, request: RolloutRequest, context: IntArray, budget: int) -> Draft:
        return self.propose_batch([request], [context], [budget]).draft(0)

    def propose_batch(
        self, requests: Sequence[RolloutRequest], contexts: Sequence[IntArray], budgets: Sequence[int]
    ) -> DraftBatch:
        agrees = np.array([self._agrees(*each) for each in zip(requests, contexts, strict=True)], np.bool_)
        indices, others = np.flatnonzero(agrees), np.flatnonzero(~agrees)
        if len(indices) == 0:
            return self.inner.propose_batch(requests, contexts, budgets)
        prefetched = [self._prefetched[request.id] for request in _at(indices, requests)]
        drafts = _packed(prefetched, _at(indices, budgets)).spread(indices, len(requests))
        if len(others) == 0:
            return drafts
        theirs = self.inner.propose_batch(_at(others, requests), _at(others, contexts), _at(others, budgets))
        return merged(drafts, placed(theirs, others, len(requests)))

    def _agrees(self, request: RolloutRequest, context: IntArray) -> bool:
        """Return whether the whole response agrees, and there is more to come."""
        prefetched = self._prefetched.get(request.id)
        if prefetched is not None and not prefetched.follow(context[len(request.prompt.token_ids) :]):
            del self._prefetched[request.id]
            return False
        return prefetched is not None

    def catch_up(self) -> None:
        self.inner.catch_up()

    # -- what is known -------------------------------------------------------------------------------------------

    def start(self, request: RolloutRequest) -> None:
        if request.prefetched is not None:
            self._prefetched[request.id] = _Prefetched(request.prefetched)
        self.inner.start(request)

    def accept(self, request: RolloutRequest, token_ids: IntArray, num_accepted: int) -> None:
        self.inner.accept(request, token_ids, num_accepted)

    def finish(self, completion: Completion) -> None:
        self._prefetched.pop(completion.request.id, None)
        self.inner.finish(completion)

    def learn(self, samples: Sequence[Sample]) -> None:
        self.inner.learn(samples)

    def follow(self, delta: HistoryDelta) -> None:
        self.inner.follow(delta)

    def close(self) -> None:
        self._prefetched.clear()
        self.inner.close()


def listens(drafter: Drafter, hook: str) -> bool:
    """Return whether the drafter does anything at that hook, which one that wraps another only passes on."""
    return getattr(type(innermost(drafter)), hook) is not getattr(Drafter, hook)


def innermost(drafter: Drafter) -> Drafter:
    """Return the one that others wrap."""
    while isinstance(drafter, RunAheadDrafter):
        drafter = drafter.inner
    return drafter


@dataclass(slots=True)
class _Prefetched:
    """The prefetched tokens, and how many of them the response has, at the same positions."""

    token_ids: IntArray
    agreed: int = 0

    def follow(self, response: IntArray) -> bool:
        """Look at what is new in the response. False when that disagrees, or has reached the end."""
        start, self.agreed = self.agreed, len(response)
        new = self.token_ids[start : self.agreed]
        return self.agreed < len(self.token_ids) and np.array_equal(new, response[start:])


def _at(indices: IndexArray, values: Sequence[T]) -> list[T]:
    return [values[index] for index in indices.tolist()]


def _packed(prefetched: Sequence[_Prefetched], budgets: Sequence[int]) -> DraftBatch:
    """Return the tokens that come next, a path each."""
    paths = [
        each.token_ids[each.agreed : each.agreed + budget] for each, budget in zip(prefetched, budgets, strict=True)
    ]
    starts = np.cumsum([0, *map(len, paths)], dtype=np.int64)
    parents = np.arange(starts[-1]) - np.repeat(starts[:-1], np.diff(starts)) - 1
    return DraftBatch(
        token_ids=np.concatenate(paths).astype(np.int32),
        parents=parents.astype(np.int32),
        starts=starts,
        scores=_RATE ** (parents + 2.0),
        match_length=np.array(
            [REACH + 1 + each.agreed for each in prefetched], np.int32
        ),  # longer than any index finds
        sources=np.full(len(parents), DraftSource.RUN_AHEAD, np.int8),
    )
