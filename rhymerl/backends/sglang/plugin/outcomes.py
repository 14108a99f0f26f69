"""Outcomes of SGLang's passes, read off sampled tokens before the next pass.

R = requests, N = nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rhymerl.backends.sglang.plugin.rows import EngineRow
from rhymerl.budgets.base import PassOutcome
from rhymerl.drafts import DraftBatch
from rhymerl.engine.walk import walk


@dataclass(slots=True, kw_only=True)
class VerifiedPass:
    """A launched pass: its requests [R], their drafts, and the nodes computed for each, padding included."""

    rows: Sequence[EngineRow]
    drafts: DraftBatch
    width: int
    started: float  # when all tokens before it were known
    is_alone: bool = True  # nothing else ran until its own were
    _ends: list[int] = field(init=False)  # of each row's tokens before it

    def __post_init__(self) -> None:
        self._ends = [row.end for row in self.rows]

    def outcome(self, known: float) -> PassOutcome:
        """Return the outcome once tokens are in the rows, since `known`; requests put back in the queue have none."""
        drafts, num_rows = self.drafts, len(self.rows)
        sampled = [row.tokens[end : row.end] for row, end in zip(self.rows, self._ends, strict=True)]
        return PassOutcome(
            requests=[row.request for row in self.rows],
            drafts=drafts,
            **walk(drafts, sampled)._asdict(),
            num_tokens=num_rows * (1 + self.width),
            num_rows=num_rows,
            seconds=known - self.started if self.is_alone else None,
            is_decoding=self.is_alone,
            num_padding=num_rows * self.width - len(drafts.token_ids),
        )
