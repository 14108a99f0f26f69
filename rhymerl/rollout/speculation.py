"""How far drafts carried answers, whichever backend verified them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rhymerl.types import Completion


@dataclass(slots=True)
class Speculation:
    """Sums over whole answers."""

    tokens: int = 0
    request_passes: int = 0  # an answer's passes in which it got tokens
    drafted: int = 0  # draft nodes verified
    accepted: int = 0  # draft nodes that became tokens

    def count(self, completions: Iterable[Completion]) -> None:
        """Add answers."""
        for completion in completions:
            self.tokens += len(completion.token_ids)
            self.request_passes += completion.num_passes
            self.drafted += completion.num_drafted
            self.accepted += completion.num_accepted

    @property
    def accept_rate(self) -> float:
        """Drafted tokens that were accepted, over those that were verified; 0 without drafts."""
        return self.accepted / max(self.drafted, 1)

    @property
    def accept_length(self) -> float:
        """Tokens a pass and answer; 1 without drafts."""
        return self.tokens / max(self.request_passes, 1)
