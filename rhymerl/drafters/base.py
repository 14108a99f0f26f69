"""What a drafter is: it guesses the next tokens. A wrong guess costs time, never correctness."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rhymerl.types import Completion, Draft, RolloutRequest, Sample

if TYPE_CHECKING:
    from rhymerl.types import IntArray


class Drafter(ABC):
    """Subclass this and write `propose`; every other hook is an optional no-op."""

    @abstractmethod
    def propose(self, request: RolloutRequest, context: IntArray, budget: int) -> Draft:
        """Guess what follows `context` ([prompt + response so far], int32, read-only) with at most `budget` nodes."""

    def propose_batch(
        self, requests: Sequence[RolloutRequest], contexts: Sequence[IntArray], budgets: Sequence[int]
    ) -> list[Draft]:
        """Guess for all running requests at once; called once a pass. Override it where a batch is cheaper."""
        return [self.propose(*each) for each in zip(requests, contexts, budgets, strict=True)]

    def start(self, request: RolloutRequest) -> None:
        """A request enters the running batch."""

    def accept(self, request: RolloutRequest, token_ids: IntArray, num_accepted: int) -> None:
        """A pass emitted `token_ids` for `request`, the first `num_accepted` of them from the draft."""

    def finish(self, completion: Completion) -> None:
        """A request left the running batch, whole or withdrawn."""

    def learn(self, samples: Sequence[Sample]) -> None:
        """The scored answers of a step, in canonical (prompt, sample) order."""
