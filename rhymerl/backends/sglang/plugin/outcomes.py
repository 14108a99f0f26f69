"""What came of a pass of SGLang, for the budget: read off the tokens that were sampled, when the next pass is prepared. R = requests, N = nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from rhymerl.backends.sglang.plugin.rows import EngineRow
from rhymerl.budgets.base import PassOutcome
from rhymerl.compiled import compiled
from rhymerl.drafts import DraftBatch

if TYPE_CHECKING:
    from rhymerl.types import BoolArray, IndexArray, IntArray


@dataclass(slots=True, kw_only=True)
class VerifiedPass:
    """A pass that is launched: its requests [R], their drafts, and how many nodes of each are computed, padding included."""

    rows: Sequence[EngineRow]
    drafts: DraftBatch
    width: int
    started: float  # when all tokens before it were known
    is_alone: bool = True  # nothing else ran until its own were
    _ends: list[int] = field(init=False)  # of each row's tokens before it

    def __post_init__(self) -> None:
        self._ends = [row.end for row in self.rows]

    def outcome(self, known: float) -> PassOutcome:
        """Return what came of it, when its tokens are in the rows, since `known`. Of a request that was put back into the queue nothing is known."""
        drafts, num_rows = self.drafts, len(self.rows)
        sampled = [row.tokens[end : row.end] for row, end in zip(self.rows, self._ends, strict=True)]
        starts = np.concatenate([[0], np.cumsum([len(each) for each in sampled])])
        reached, accepted = np.zeros((2, len(drafts.token_ids)), np.bool_)
        num_accepted = np.zeros(num_rows, np.int64)
        tokens = np.concatenate([*sampled, np.empty(0, np.int32)])
        _walk(drafts.token_ids, drafts.parents, drafts.starts, tokens, starts, reached, accepted, num_accepted)
        padding = num_rows * self.width - len(drafts.token_ids)
        return PassOutcome(
            requests=[row.request for row in self.rows],
            drafts=drafts,
            reached=reached,
            accepted=accepted,
            num_accepted=num_accepted,
            num_tokens=num_rows * (1 + self.width),
            num_rows=num_rows,
            seconds=known - self.started if self.is_alone else None,
            is_decoding=self.is_alone,
            num_padding=padding,
        )


@compiled
def _walk(
    token_ids: IntArray,
    parents: IntArray,
    starts: IndexArray,
    sampled: IntArray,
    sampled_starts: IndexArray,
    reached: BoolArray,
    accepted: BoolArray,
    num_accepted: IndexArray,
) -> None:
    """Follow each request's sampled tokens down its tree: `accepted` are the nodes they meet, `reached` all children on that way."""
    for r in range(len(num_accepted)):
        first, at = starts[r], -1
        for k in range(sampled_starts[r], sampled_starts[r + 1]):
            found = -1
            for node in range(first, starts[r + 1]):
                if parents[node] == at:
                    reached[node] = True
                    if token_ids[node] == sampled[k]:
                        found = node
            if found < 0:
                break
            accepted[found] = True
            num_accepted[r] += 1
            at = found - first
