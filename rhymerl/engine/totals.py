"""The totals of an engine's work, for metrics."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

import numpy as np
import numpy.typing as npt

NUM_DEPTHS = 8


def _by_depth() -> npt.NDArray[np.int64]:
    return np.zeros(NUM_DEPTHS, np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class PassRecord:
    """One pass, for a profile."""

    end_s: float  # in Unix time
    seconds: float
    requests: int
    tokens: int  # that went through the model
    draft_nodes: int  # of these


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
    drafts_to_depth: npt.NDArray[np.int64] = field(
        default_factory=_by_depth
    )  # verified ones with a node at depth 1, 2, …
    accepted_to_depth: npt.NDArray[np.int64] = field(default_factory=_by_depth)  # of these, accepted so far down

    def minus(self, other: EngineTotals) -> EngineTotals:
        """Return what was added since `other`."""
        return EngineTotals(*(getattr(self, f.name) - getattr(other, f.name) for f in fields(self)))
