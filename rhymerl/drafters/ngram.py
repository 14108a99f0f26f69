"""Prompt lookup: drafts what followed the latest earlier occurrence of the context's last tokens in the context."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rhymerl.drafters.base import Drafter
from rhymerl.drafters.live import LiveGroup
from rhymerl.drafts import Draft, DraftSource
from rhymerl.errors import at_least, check_ranges, require
from rhymerl.history.index import REACH
from rhymerl.types import Completion, IntArray, RolloutRequest

_MOST = 16  # positions with the longest suffix among which the latest is looked for
_NOTHING = Draft(token_ids=np.empty(0, np.int32), parents=np.empty(0, np.int32))


@dataclass(kw_only=True, eq=False)
class NGramDrafter(Drafter):
    """One path, from the request's own prompt and tokens: no history, no other request, nothing to keep.

    The draft follows the longest suffix of `min_match` to `max_match` tokens that has occurred before. An index that
    grows with the answer finds it; the context is never scanned.
    """

    min_match: int = at_least(1, 2)
    max_match: int = REACH

    def __post_init__(self) -> None:
        check_ranges(self)
        known_matches = f"from min_match={self.min_match} to {REACH}"
        require(self.min_match <= self.max_match <= REACH, "max_match", self.max_match, known_matches)
        self._contexts: dict[str, LiveGroup] = {}  # by request id

    def finish(self, completion: Completion) -> None:
        self._contexts.pop(completion.request.id, None)

    def close(self) -> None:
        self._contexts.clear()

    def propose(self, request: RolloutRequest, context: IntArray, budget: int) -> Draft:
        group = self._contexts.get(request.id)
        if group is None:
            group = self._contexts[request.id] = LiveGroup(request.prompt.token_ids)
        rows = group.extend([request.id], [context])
        group.catch_up()
        index, ends = group.index, group.index.ends[rows]
        found = index.matches(index.text, ends, most=_MOST, shortest=self.min_match, longest=self.max_match)
        lengths = found.lengths[0, : found.counts[0]]
        if len(lengths) == 0:
            return _NOTHING
        latest = int(found.positions[0, : len(lengths)][lengths == lengths[0]].max())
        start = int(index.starts[rows[0]])
        # Where that is in the context: in the answer, or in the prompt.
        position = latest - start + len(group.prompt) if latest >= start else latest - int(index.starts[0])
        tokens = context[position : position + budget]
        return Draft(
            token_ids=tokens,
            parents=np.arange(-1, len(tokens) - 1, dtype=np.int32),
            match_length=int(lengths[0]),
            sources=np.full(len(tokens), DraftSource.OWN, np.int32),
        )
