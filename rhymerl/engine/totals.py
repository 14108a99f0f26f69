"""What an engine has done, for metrics."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(slots=True)
class EngineTotals:
    """Sums since the engine started."""

    passes: int = 0
    fed_tokens: int = 0
    emitted_tokens: int = 0
    drafted_nodes: int = 0
    accepted_nodes: int = 0
    request_passes: int = 0  # passes times the rows that emitted in them
    preemptions: int = 0
    bad_drafts: int = 0
    busy_s: float = 0.0
    tail_s: float = 0.0  # of busy_s, with less than a quarter of the slots running
    draft_s: float = 0.0

    def minus(self, other: EngineTotals) -> EngineTotals:
        """What was added since `other`."""
        return EngineTotals(*(getattr(self, f.name) - getattr(other, f.name) for f in fields(self)))
