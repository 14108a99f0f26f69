"""Drafts from what the previous policy sampled for the same request with the same noise; then another drafter's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from rhymerl.drafters.base import Drafter
from rhymerl.drafts import Draft, DraftBatch, DraftSource, merge_drafts, placed
from rhymerl.history.index import REACH
from rhymerl.history.records import HistoryDelta
from rhymerl.types import Completion, IndexArray, IntArray, RolloutRequest, Sample

T = TypeVar("T")

# The rate at which tokens are right when all before them were. It is not learned here: budgets calibrate scores, and
# what they have learned is in checkpoints, so that a resumed run verifies the very nodes that the whole run did.
_RATE = 0.95
_AGREE_AGAIN = 3  # tokens after a wrong one
_AGREEING = 16  # match lengths of those that agree again


class RunAheadDrafter(Drafter):
    """Drafts `RolloutRequest.prefetched`: tokens after the response, as one path, while the response agrees with it.

    Both were sampled with the same noise, so a token is wrong only where the update has changed that draw. After a
    wrong token `inner` drafts for the request until a few tokens agree again at the same positions. `inner` also drafts
    after the last prefetched token, and for all requests without such tokens.
    """

    def __init__(self, inner: Drafter) -> None:
        self.inner = inner
        self._prefetched: dict[str, _Prefetched] = {}  # by id of a request whose response is not as long yet

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
        drafts = _packed(prefetched, _at(indices, budgets)).scatter(indices, len(requests))
        if len(others) == 0:
            return drafts
        theirs = self.inner.propose_batch(_at(others, requests), _at(others, contexts), _at(others, budgets))
        return merge_drafts(drafts, placed(theirs, others, len(requests)))

    def _agrees(self, request: RolloutRequest, context: IntArray) -> bool:
        """Return whether the response agrees, and there is more to come."""
        prefetched = self._prefetched.get(request.id)
        if prefetched is None:
            return False
        prefetched.follow(context[len(request.prompt.token_ids) :])
        if prefetched.is_over:
            del self._prefetched[request.id]
            return False
        return prefetched.agrees

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


@dataclass(slots=True)
class _Prefetched:
    """The prefetched tokens of a request, and how they agree with its response."""

    token_ids: IntArray
    length: int = 0  # of the response
    wrong_at: int = -1  # the last position at which they differ

    def follow(self, response: IntArray) -> None:
        """Look at what is new in the response."""
        start, self.length = self.length, len(response)
        new = self.token_ids[start : self.length]
        wrong = np.flatnonzero(new != response[start : start + len(new)])
        if len(wrong):
            self.wrong_at = start + int(wrong[-1])

    @property
    def is_over(self) -> bool:
        return self.length >= len(self.token_ids)

    @property
    def agreed(self) -> int:
        """Return how many of the last tokens agree."""
        return self.length - 1 - self.wrong_at

    @property
    def agrees(self) -> bool:
        return self.wrong_at < 0 or self.agreed >= _AGREE_AGAIN

    @property
    def match_length(self) -> int:
        """Return the match length for budgets: all tokens agree, the last ones do again, or an index's match."""
        again = min(self.agreed, _AGREEING - 1)
        return REACH + 1 + (again if self.wrong_at >= 0 else _AGREEING + self.length)


def _at(indices: IndexArray, values: Sequence[T]) -> list[T]:
    return [values[index] for index in indices.tolist()]


def _packed(prefetched: Sequence[_Prefetched], budgets: Sequence[int]) -> DraftBatch:
    """Return the tokens that come next, a path each."""
    paths = [
        each.token_ids[each.length : each.length + budget] for each, budget in zip(prefetched, budgets, strict=True)
    ]
    starts = np.cumsum([0, *map(len, paths)], dtype=np.int64)
    parents = np.arange(starts[-1]) - np.repeat(starts[:-1], np.diff(starts)) - 1
    return DraftBatch(
        token_ids=np.concatenate(paths).astype(np.int32),
        parents=parents.astype(np.int32),
        starts=starts,
        scores=_RATE ** (parents + 2.0),
        match_length=np.array([each.match_length for each in prefetched], np.int32),
        sources=np.full(len(parents), DraftSource.RUN_AHEAD, np.int8),
    )
