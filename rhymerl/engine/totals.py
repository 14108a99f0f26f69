"""What an engine's passes did, and the totals of them, for metrics."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

NUM_DEPTHS = 8


def _by_depth() -> npt.NDArray[np.int64]:
    return np.zeros(NUM_DEPTHS, np.int64)


class PassRecord(NamedTuple):
    """One pass, for observers that count or measure."""

    rows: int  # requests that sampled tokens
    nodes: int
    asked: int  # requests for which the drafter was asked
    prompt_tokens: int
    seen: int  # keys that roots and nodes attended to, summed
    draft_s: float  # of `seconds`
    seconds: float
    end_s: float  # in Unix time
    num_emitted: int  # tokens
    is_tail: bool  # less than a quarter of the slots that were running sampled

    @property
    def tokens(self) -> int:
        """The number of tokens that went through the model."""
        return self.rows + self.nodes + self.prompt_tokens


@dataclass(slots=True)
class EngineTotals:
    """Sums since the engine started. Arrays are replaced, never written to, so that a shallow copy is a snapshot."""

    passes: int = 0
    fed_tokens: int = 0
    emitted_tokens: int = 0
    drafted_nodes: int = 0
    accepted_nodes: int = 0
    request_passes: int = 0  # passes times the rows that emitted in them
    preemptions: int = 0
    asks: int = 0  # drafts that the drafter was asked for
    hits: int = 0  # of these, drafts with at least one node
    bad_drafts: int = 0
    accepted_own: int = 0  # accepted nodes by DraftSource
    accepted_sibling: int = 0
    accepted_run_ahead: int = 0
    accepted_other: int = 0
    accepted_history: int = 0
    accepted_age_epochs: int = 0  # sum over accepted_history
    drafted_run_ahead: int = 0  # of drafted_nodes
    busy_s: float = 0.0
    tail_s: float = 0.0  # of busy_s, with less than a quarter of the slots running
    draft_s: float = 0.0
    # Verified drafts with a node at depth 1, 2, …
    drafts_to_depth: npt.NDArray[np.int64] = field(default_factory=_by_depth)
    accepted_to_depth: npt.NDArray[np.int64] = field(default_factory=_by_depth)  # of these, accepted so far down

    def note(self, record: PassRecord) -> None:
        """A pass is over."""
        self.passes += 1
        self.fed_tokens += record.tokens
        self.emitted_tokens += record.num_emitted
        self.request_passes += record.rows
        self.busy_s += record.seconds
        self.tail_s += record.seconds if record.is_tail else 0.0

    def minus(self, other: EngineTotals) -> EngineTotals:
        """Return what was added since `other`."""
        return EngineTotals(*(getattr(self, f.name) - getattr(other, f.name) for f in fields(self)))
